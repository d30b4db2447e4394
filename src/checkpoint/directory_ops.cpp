#include "checkpoint/directory_ops.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "os/access.h"
#include "os/durable.h"
#include "os/file_type.h"
#include "os/unique_fd.h"

namespace trunkline::checkpoint {
DirectoryOps DirectoryOps::checked_by(std::function<Status()> check) const {
  return DirectoryOps(
      [check = std::move(check), watch = watch_](Kind kind, const std::string& path) -> Status {
        if (auto checked = check(); !checked) return checked;
        return watch ? watch(kind, path) : Status{};
      });
}

Status DirectoryOps::make_directory(const std::string& path) const { return make_directory(path, 0777); }

Status DirectoryOps::make_directory(const std::string& path, mode_t mode) const {
  if (os::is_directory(path)) return {};
  if (auto watched = about_to(Kind::make_directory, path); !watched) return watched;
  if (::mkdir(path.c_str(), mode) == 0 || (errno == EEXIST && os::is_directory(path))) return {};
  return std::unexpected(system_error(errno, "create the directory " + path, path));
}

Status DirectoryOps::make_directories_durably(const std::string& path, const std::string& like) const {
  if (os::is_directory(path)) return {};
  const std::string parent = std::filesystem::path(path).parent_path().string();
  if (!parent.empty() && parent != path) {
    if (auto made = make_directories_durably(parent); !made) return made;
  }
  const os::UniqueFd model(like.empty() ? -1 : ::open(like.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Nobody else may use it before its permissions are set.
  if (auto made = make_directory(path, model.valid() ? 0700 : 0777); !made) return made;
  if (model.valid()) {
    const os::UniqueFd made(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (made.valid()) os::copy_directory_access(model.get(), made.get());
  }
  return sync_directory(parent.empty() ? "." : parent);
}

Status DirectoryOps::sync_directory(const std::string& path) const {
  if (auto watched = about_to(Kind::sync_directory, path); !watched) return watched;
  return os::fsync_directory(path);
}

Status DirectoryOps::create_file_durably(const std::string& path, std::string_view contents,
                                         const std::string& access_of) const {
  if (auto watched = about_to(Kind::write_file, path); !watched) return watched;
  const auto directory = os::write_synced_file(path, contents, os::IfPresent::fail, access_of);
  if (!directory) return std::unexpected(directory.error());
  if (auto watched = about_to(Kind::sync_name, path); !watched) return watched;
  return os::fsync_directory(*directory);
}

Status DirectoryOps::replace_file_durably(const std::string& path, std::string_view contents) const {
  if (auto watched = about_to(Kind::write_file, path); !watched) return watched;
  if (os::is_symlink(path)) {
    return std::unexpected(
        make_error(ErrorKind::unsupported,
                   fmt::format("cannot change {}: it is a symbolic link, and its target may belong to "
                               "another directory of checkpoints (cp -rs makes such copies); replace the "
                               "link by a copy of its target, or save to a new directory",
                               path),
                   path));
  }
  return os::write_file_durably(path, contents, os::IfPresent::replace);
}

Status DirectoryOps::link_file(const std::string& from, const std::string& to) const {
  if (auto watched = about_to(Kind::link_file, to); !watched) return watched;
  if (::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), 0) == 0) return {};
  return std::unexpected(system_error(errno, fmt::format("make {} a hard link to {}", to, from), to));
}

Status DirectoryOps::rename(const std::string& from, const std::string& to) const {
  if (auto watched = about_to(Kind::rename, from); !watched) return watched;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return {};
  // rename(2) replaces a directory only if it is empty.
  if (os::may_lack_rename_flags(errno) && ::rename(from.c_str(), to.c_str()) == 0) return {};
  return std::unexpected(system_error(errno, fmt::format("move {} to {}", from, to), from));
}

Status DirectoryOps::remove_file(const std::string& path) const {
  if (auto watched = about_to(Kind::remove_file, path); !watched) return watched;
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return {};
  return std::unexpected(system_error(errno, "remove " + path, path));
}

Status DirectoryOps::remove_directory(const std::string& path) const {
  if (auto watched = about_to(Kind::remove_directory, path); !watched) return watched;
  if (::rmdir(path.c_str()) == 0 || errno == ENOENT || errno == ENOTEMPTY || errno == EEXIST) return {};
  return std::unexpected(system_error(errno, "remove the directory " + path, path));
}

}  // namespace trunkline::checkpoint
