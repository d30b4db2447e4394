// Who may use a file or directory: owner, group, mode and access control list.
#pragma once

#include <sys/stat.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "os/unique_fd.h"

namespace trunkline::os {

inline constexpr const char* kAccessAcl = "system.posix_acl_access";

// An extended attribute of the file open as `fd`; nullopt: there is none, or it cannot be read.
std::optional<std::string> attribute(int fd, const char* name);

// Each copies the access rights of `from` to `to`, which was created with no more than 0700, or with the
// kernel's defaults. `old` is the state of `from`. What this process may not set is left out, and access is
// never widened: where the group cannot be kept, group and others get only what both had; where the access
// control list cannot be kept, they get nothing.
void copy_file_access(int from, const struct stat& old, int to);
void copy_directory_access(int from, int to);

// The access rights of a file, for others that take its place under other names.
class FileAccess {
 public:
  static constexpr mode_t kCreateMode = 0600;  // of the files that give_to() gets

  // Of the file to which `path` leads; nullopt: there is none. One that this process may not open gives
  // nobody but the owner of a new file any rights.
  static std::optional<FileAccess> of(const std::string& path);

  // As copy_file_access(). `fd`: of a file that was created with kCreateMode.
  void give_to(int fd) const;

 private:
  UniqueFd fd_;
  struct stat status_{};
};

// Of the files in `directory` whose names `is_wanted` accepts, the path of the one that the fewest may use;
// empty: there are none.
std::string most_private_file(const std::string& directory,
                              const std::function<bool(std::string_view name)>& is_wanted);

}  // namespace trunkline::os
