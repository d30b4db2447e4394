#include "os/access.h"

#include <fcntl.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

namespace trunkline::os {
namespace {

constexpr const char* kDefaultAcl = "system.posix_acl_default";  // of a directory: the ACL of new files in it
constexpr mode_t kOwnerBits = 0700;
constexpr mode_t kOthersBits = 07;

// The part of `mode` that group and others may keep when the group changes: members of the new group used to
// be others, and members of the old group now are others.
mode_t without_group(mode_t mode) {
  const mode_t both = (mode >> 3) & mode & kOthersBits;
  return (mode & kOwnerBits) | both << 3 | both;
}

// Copies owner, group, ACL and mode, in an order that never widens access. Until now `to` had no bits for
// group and others, or those of a new file.
void copy_access_of(int from, const struct stat& old, int to, mode_t kept) {
  mode_t mode = old.st_mode & kept;
  struct stat now{};
  if (::fstat(to, &now) != 0) return;
  bool same_group = true;
  if ((now.st_uid != old.st_uid || now.st_gid != old.st_gid) && ::fchown(to, old.st_uid, old.st_gid) != 0 &&
      now.st_gid != old.st_gid)
    same_group = ::fchown(to, static_cast<uid_t>(-1), old.st_gid) == 0;
  const auto acl = attribute(from, kAccessAcl);
  // With an ACL the group bits are its mask, and the ACL may deny a user what others may do.
  const bool has_acl = acl && same_group && ::fsetxattr(to, kAccessAcl, acl->data(), acl->size(), 0) == 0;
  if (!has_acl) ::fremovexattr(to, kAccessAcl);  // inherited from the directory's default ACL
  if (acl && !has_acl) {
    mode &= kOwnerBits;
  } else if (!same_group) {
    mode = without_group(mode);
  }
  if (::fstat(to, &now) != 0 || (now.st_mode & 07777) != mode) ::fchmod(to, mode);
}

}  // namespace

std::optional<std::string> attribute(int fd, const char* name) {
  std::string value;
  ssize_t bytes = 0;
  do {
    bytes = ::fgetxattr(fd, name, nullptr, 0);
    if (bytes < 0) return std::nullopt;
    value.resize(static_cast<std::size_t>(bytes));
    bytes = ::fgetxattr(fd, name, value.data(), value.size());
  } while (bytes < 0 && errno == ERANGE);
  if (bytes < 0) return std::nullopt;
  value.resize(static_cast<std::size_t>(bytes));
  return value;
}

void copy_file_access(int from, const struct stat& old, int to) {
  constexpr mode_t kKeptBits = 01777;  // a write drops setuid and setgid
  copy_access_of(from, old, to, kKeptBits);
}

void copy_directory_access(int from, int to) {
  struct stat old{};
  if (::fstat(from, &old) != 0) return;
  constexpr mode_t kKeptBits = 03777;  // setgid passes the group on to new entries
  const auto acl = attribute(from, kDefaultAcl);
  if (acl)
    ::fsetxattr(to, kDefaultAcl, acl->data(), acl->size(), 0);
  else
    ::fremovexattr(to, kDefaultAcl);
  copy_access_of(from, old, to, kKeptBits);
}

std::optional<FileAccess> FileAccess::of(const std::string& path) {
  FileAccess access;
  // Before it is opened: opening a device may have side effects.
  if (::stat(path.c_str(), &access.status_) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    return access;
  }
  if (!S_ISREG(access.status_.st_mode)) return std::nullopt;
  access.fd_.reset(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (access.fd_.valid() && ::fstat(access.fd_.get(), &access.status_) != 0) access.fd_.reset();
  return access;
}

void FileAccess::give_to(int fd) const {
  if (fd_.valid())
    copy_file_access(fd_.get(), status_, fd);
  else
    ::fchmod(fd, kCreateMode);  // a directory's default ACL may have added to it
}

std::string most_private_file(const std::string& directory,
                              const std::function<bool(std::string_view name)>& is_wanted) {
  std::string found;
  int fewest = 0;
  std::error_code code;
  std::filesystem::directory_iterator entry(directory, code);
  for (; !code && entry != std::filesystem::directory_iterator(); entry.increment(code)) {
    struct stat status{};
    if (!is_wanted(entry->path().filename().string()) || ::stat(entry->path().c_str(), &status) != 0)
      continue;
    const int rights = std::popcount(status.st_mode & 0777U);
    if (!found.empty() && rights >= fewest) continue;
    found = entry->path().string();
    fewest = rights;
  }
  return found;
}

}  // namespace trunkline::os
