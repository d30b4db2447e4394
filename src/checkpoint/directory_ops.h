// All changes that are made to a directory of checkpoints on disk, one function for each kind: tests observe
// the order of the changes, and stop before any of them as a crash would.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

class DirectoryOps {
 public:
  // sync_name: for a file that create_file_durably() has written and named, before the fsync of its
  // directory.
  enum class Kind {
    make_directory,
    sync_directory,
    write_file,
    sync_name,
    link_file,
    rename,
    remove_file,
    remove_directory
  };
  // Called before each change; if it returns an error, the change is not made and the error is returned.
  using Watch = std::function<Status(Kind, const std::string& path)>;

  explicit DirectoryOps(Watch watch = {}) : watch_(std::move(watch)) {}

  // The same operations, with `check` called before each: they fail once it fails.
  DirectoryOps checked_by(std::function<Status()> check) const;

  Status make_directory(const std::string& path) const;  // succeeds if it exists
  // Also creates missing parent directories. New directories get the access rights of the directory `like`,
  // unless that is empty or missing.
  Status make_directories_durably(const std::string& path, const std::string& like = {}) const;
  Status sync_directory(const std::string& path) const;
  // Writes through a temporary name (src/os/durable.h); EEXIST when `path` exists. It gets the access rights
  // of the file `access_of`, unless that is empty or missing.
  Status create_file_durably(const std::string& path, std::string_view contents,
                             const std::string& access_of = {}) const;
  Status replace_file_durably(const std::string& path, std::string_view contents) const;
  // Another name, in place, for the same file; EEXIST when `to` exists. Not of a symbolic link.
  Status link_file(const std::string& from, const std::string& to) const;
  Status rename(const std::string& from, const std::string& to) const;  // EEXIST when `to` exists
  Status remove_file(const std::string& path) const;                    // succeeds if it does not exist
  Status remove_directory(const std::string& path) const;  // succeeds if it does not exist or is not empty

 private:
  Status make_directory(const std::string& path, mode_t mode) const;
  Status about_to(Kind kind, const std::string& path) const { return watch_ ? watch_(kind, path) : Status{}; }

  Watch watch_;
};

}  // namespace trunkline::checkpoint
