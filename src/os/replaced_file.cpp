#include "os/replaced_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "os/access.h"
#include "os/replaceable.h"
#include "os/same_file.h"

namespace trunkline::os {
namespace {

bool is_in_proc(const std::filesystem::path& directory) {
  struct statfs status{};
  return ::statfs(directory.c_str(), &status) == 0 && status.f_type == PROC_SUPER_MAGIC;
}

// Whether a link of /proc, such as /dev/fd/3, leads to a file that its text does not name: one that has no
// name, or not any more.
bool leads_to_nameless_file(const std::filesystem::path& link, const std::filesystem::path& text) {
  if (!is_in_proc(link.parent_path())) return false;
  struct stat opened{};
  struct stat named{};
  if (::stat(link.c_str(), &opened) != 0 || !S_ISREG(opened.st_mode)) return false;
  return ::stat((link.parent_path() / text).c_str(), &named) != 0 || !is_same_file(opened, named);
}

// Resolves symbolic links one by one, since the last one may lead to a file that does not exist yet.
Result<std::string> resolve_links(const std::string& path, const std::string& action) {
  constexpr int kMaxLinks = 40;  // like the kernel (path_resolution(7))
  std::filesystem::path target = path;
  std::error_code code;
  for (int links = 0; std::filesystem::is_symlink(std::filesystem::symlink_status(target, code)); ++links) {
    if (links == kMaxLinks) return std::unexpected(system_error(ELOOP, action, path));
    const auto next = std::filesystem::read_symlink(target, code);
    if (code) return std::unexpected(system_error(code.value(), action, path));
    if (leads_to_nameless_file(target, next)) {
      return std::unexpected(make_error(
          ErrorKind::invalid_argument,
          fmt::format("cannot {}: it is an open file that has no name, or not any more; pass the open file "
                      "itself, or a path",
                      action),
          path));
    }
    target = target.parent_path() / next;
  }
  return target.string();
}

// On overlayfs, opening a file of a lower layer for writing copies all of it, so access(2) alone checks its
// permissions there.
bool is_overlay(const std::string& path) {
  struct statfs status{};
  return ::statfs(path.c_str(), &status) == 0 &&
         static_cast<std::uint32_t>(status.f_type) == OVERLAYFS_SUPER_MAGIC;
}

int open_existing(const std::string& path) {
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0 && errno != ENOSYS && errno != EINVAL)
    return -1;
  constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  if (is_overlay(path)) {
    const int fd = ::open(path.c_str(), O_RDONLY | kFlags);
    if (fd >= 0 || errno != EACCES) return fd;
  }
  int fd = -1;
  do fd = ::open(path.c_str(), O_WRONLY | kFlags);
  while (fd < 0 && errno == EINTR);
  return fd;
}

bool have_same_attributes(const struct stat& one, const struct stat& other) {
  return is_same_file(one, other) && one.st_ctim.tv_sec == other.st_ctim.tv_sec &&
         one.st_ctim.tv_nsec == other.st_ctim.tv_nsec;
}

std::vector<std::string> attribute_names(int fd) {
  // The list may grow between the two calls; attributes that cannot be listed cannot be kept.
  std::vector<char> names;
  ssize_t bytes = 0;
  do {
    bytes = ::flistxattr(fd, nullptr, 0);
    if (bytes <= 0) return {};
    names.resize(static_cast<std::size_t>(bytes));
    bytes = ::flistxattr(fd, names.data(), names.size());
  } while (bytes < 0 && errno == ERANGE);
  std::vector<std::string> found;
  for (ssize_t at = 0; at < bytes; at += static_cast<ssize_t>(found.back().size()) + 1)
    found.emplace_back(names.data() + at);
  return found;
}

// Attributes that describe the contents are wrong for new contents; those of overlayfs belong to the inode.
bool is_copied(std::string_view name) {
  return name != kAccessAcl && name != "security.capability" && name != "security.ima" &&
         name != "security.evm" && !name.starts_with("trusted.overlay.");
}

// 0, or the errno of an attribute that does not fit.
int copy_extended_attributes(int from, int to) {
  for (const std::string& name : attribute_names(from)) {
    if (!is_copied(name)) continue;
    const auto value = attribute(from, name.c_str());
    if (!value || attribute(to, name.c_str()) == value) continue;
    if (::fsetxattr(to, name.c_str(), value->data(), value->size(), 0) == 0) continue;
    if (errno == ENOSPC || errno == EDQUOT) return errno;
  }
  return 0;
}

}  // namespace

Result<ReplacedFile> ReplacedFile::find(const std::string& path, std::string action) {
  // Rejects what following links one by one does not notice, such as another user's link in a sticky
  // directory.
  struct stat followed{};
  if (::stat(path.c_str(), &followed) != 0 && errno != ENOENT)
    return std::unexpected(system_error(errno, action, path));
  auto target = resolve_links(path, action);
  if (!target) return std::unexpected(target.error());
  ReplacedFile found(std::move(*target), std::move(action));
  if (auto opened = found.open_old(); !opened) return std::unexpected(opened.error());
  return found;
}

mode_t ReplacedFile::create_mode() const { return old_.valid() ? 0600 : 0666; }

std::unexpected<Error> ReplacedFile::failed(int code) const {
  return std::unexpected(system_error(code, action_, path_));
}

// Leaves old_ as it is if the file no longer exists.
Status ReplacedFile::open_old() {
  struct stat status{};
  // lstat first: opening a device may have side effects.
  if (::lstat(path_.c_str(), &status) != 0) {
    if (errno == ENOENT) return check_replaceable(path_, action_);
    return failed(errno);
  }
  if (S_ISDIR(status.st_mode)) return failed(EISDIR);
  if (S_ISLNK(status.st_mode)) return failed(ELOOP);  // it became a link after the links were followed
  if (!S_ISREG(status.st_mode)) {
    return std::unexpected(
        make_error(ErrorKind::unsupported,
                   "cannot " + action_ +
                       ": it exists and is not a regular file; name a file, or a path that does not exist",
                   path_));
  }
  if (auto replaceable = check_replaceable(path_, action_); !replaceable) return replaceable;
  UniqueFd fd(open_existing(path_));
  if (!fd.valid()) {
    if (errno == ENOENT) return {};
    return failed(errno);
  }
  old_ = std::move(fd);
  return {};
}

Result<bool> ReplacedFile::copy_attributes_to(int fd) {
  if (auto opened = open_old(); !opened) return std::unexpected(opened.error());
  if (!old_.valid()) return false;
  struct stat old{};
  if (::fstat(old_.get(), &old) != 0) return failed(errno);
  if (copied_ && have_same_attributes(old, seen_)) return false;
  if (const int code = copy_extended_attributes(old_.get(), fd); code != 0) return failed(code);
  copy_file_access(old_.get(), old, fd);
  seen_ = old;
  copied_ = true;
  return true;
}

}  // namespace trunkline::os
