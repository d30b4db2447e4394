#include "os/same_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstdint>

#include "os/filesystem_magic.h"

namespace trunkline::os {
namespace {

bool has_unstable_inodes(const struct statfs& filesystem) {
  const auto type = static_cast<std::uint32_t>(filesystem.f_type);
  return type == FUSE_SUPER_MAGIC || type == kCifsMagic || type == kSmb2Magic;
}

}  // namespace

bool has_unstable_inodes(int fd) {
  struct statfs filesystem{};
  return ::fstatfs(fd, &filesystem) != 0 || has_unstable_inodes(filesystem);
}

bool has_unstable_inodes(const std::string& path) {
  struct statfs filesystem{};
  return ::statfs(path.c_str(), &filesystem) != 0 || has_unstable_inodes(filesystem);
}

std::uint64_t birth_of(const std::string& path) {
  constexpr std::uint64_t kNanoseconds = 1'000'000'000;
  struct statx status{};
  if (::statx(AT_FDCWD, path.c_str(), 0, STATX_BTIME, &status) != 0) return 0;
  if ((status.stx_mask & STATX_BTIME) == 0 || status.stx_btime.tv_sec <= 0) return 0;
  return static_cast<std::uint64_t>(status.stx_btime.tv_sec) * kNanoseconds + status.stx_btime.tv_nsec;
}

Result<std::uint64_t> directory_identity(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0)
    return std::unexpected(system_error(errno, "examine " + path, path));
  return has_unstable_inodes(path) ? 0 : status.st_ino + birth_of(path);
}

bool is_same_file(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

Status check_leads_to(const std::string& path, int fd) {
  struct stat opened{};
  struct stat named{};
  if (::stat(path.c_str(), &named) != 0)
    return std::unexpected(
        Error{.kind = ErrorKind::system,
              .code = errno,
              .message = fmt::format("{} was moved or removed meanwhile: {}", path, errno_reason(errno)),
              .path = path});
  if (::fstat(fd, &opened) != 0)
    return std::unexpected(system_error(errno, "check what was opened as " + path, path));
  if (is_same_file(named, opened)) return {};
  if (named.st_dev == opened.st_dev && has_unstable_inodes(fd)) return {};
  return std::unexpected(Error{
      .kind = ErrorKind::system,
      .code = ESTALE,
      .message = fmt::format("{} was moved or replaced meanwhile, and leads to something else now (ESTALE); "
                             "check what is there, then try again",
                             path),
      .path = path});
}

}  // namespace trunkline::os
