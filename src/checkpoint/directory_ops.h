// Everything that a directory of checkpoints changes on disk, one kind of change a function: tests see the
// order of the changes, and stop before any of them as a crash would.
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
  // sync_name: of a file that create_file_durably() has written and named, before the fsync of its directory.
  enum class Kind {
    make_directory,
    sync_directory,
    write_file,
    sync_name,
    rename,
    remove_file,
    remove_directory
  };
  // Called before each change; an error is returned in place of making it.
  using Watch = std::function<Status(Kind, const std::string& path)>;

  explicit DirectoryOps(Watch watch = {}) : watch_(std::move(watch)) {}

  // The same, which fail once `check` fails: it is called before each.
  DirectoryOps checked_by(std::function<Status()> check) const;

  Status make_directory(const std::string& path) const;  // one that exists is fine
  // And all above it that are missing. Who may use one that is made is as for the directory `like`, unless
  // that is empty or missing.
  Status make_directories_durably(const std::string& path, const std::string& like = {}) const;
  Status sync_directory(const std::string& path) const;
  // Through a temporary name (src/os/durable.h); EEXIST when `path` is there already.
  Status create_file_durably(const std::string& path, std::string_view contents) const;
  Status replace_file_durably(const std::string& path, std::string_view contents) const;
  Status rename(const std::string& from, const std::string& to) const;  // EEXIST when `to` is there already
  Status remove_file(const std::string& path) const;                    // one that is gone already is fine
  Status remove_directory(const std::string& path) const;  // one that is gone or not empty is fine

 private:
  Status make_directory(const std::string& path, mode_t mode) const;
  Status about_to(Kind kind, const std::string& path) const { return watch_ ? watch_(kind, path) : Status{}; }

  Watch watch_;
};

}  // namespace trunkline::checkpoint
