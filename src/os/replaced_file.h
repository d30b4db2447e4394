// The file that a save replaces: where it is, whether it may be replaced, and the attributes that its
// replacement inherits.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <string>

#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::os {

// A rename replaces a file regardless of its permissions, and the new file starts with the attributes of any
// new file. Users who save over a file expect neither, since open(path, O_WRONLY | O_TRUNC) does
// neither. So every temporary file that is renamed to a user's file goes through this class:
//
// 1. find() before anything is written: fails where that open would.
// 2. The temporary file is created beside path() with create_mode(): others never have more access to it than
// to the file that it replaces.
// 3. copy_attributes_to() before its fsync, and once more just before the rename.
class ReplacedFile {
 public:
  // Follows symbolic links, like open(2): path() is their target, which need not exist. Fails with the error
  // of opening it for writing (EACCES, EPERM, EROFS, ETXTBSY, EISDIR, ELOOP, ...), with that of
  // check_replaceable() where a rename cannot replace it, and with `unsupported` for anything but a regular
  // file. `action` is what the message says that cannot be done ("save to /data/a.bin").
  static Result<ReplacedFile> find(const std::string& path, std::string action);

  const std::string& path() const { return path_; }

  bool exists() const { return old_.valid(); }

  // For open(2) with O_CREAT. If there is no old file, the kernel treats it like the mode of any new file:
  // the umask or the directory's default ACL decides.
  mode_t create_mode() const;

  // Gives the temporary file `fd` the mode, owner, group and extended attributes (ACL included) of the file
  // at path(), unless that was done already and they have not changed. Returns whether anything was done.
  //
  // What this process may not set is left out, and access is never widened: where the group cannot be kept,
  // group and others get only what both had; where the ACL cannot be kept, they get nothing. As with any
  // write, setuid, setgid and capabilities are dropped. Fails where the file may not be replaced (any more),
  // and where an extended attribute does not fit (ENOSPC, EDQUOT).
  Result<bool> copy_attributes_to(int fd);

 private:
  ReplacedFile(std::string path, std::string action) : path_(std::move(path)), action_(std::move(action)) {}

  Status open_old();
  std::unexpected<Error> failed(int code) const;

  std::string path_;
  std::string action_;
  UniqueFd old_;        // invalid: there is no file to replace
  struct stat seen_{};  // the state of old_ when its attributes were copied
  bool copied_ = false;
};

}  // namespace trunkline::os
