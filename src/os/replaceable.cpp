#include "os/replaceable.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>

#include "os/durable.h"
#include "os/mountinfo.h"

namespace trunkline::os {
namespace {

// Nothing where the kernel (before 5.8), the filesystem or a sandbox does not report it.
std::optional<bool> has_attribute(const std::string& path, std::uint64_t attribute) {
  struct statx status{};
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, 0, &status) != 0) return std::nullopt;
  if ((status.stx_attributes_mask & attribute) == 0) return std::nullopt;
  return (status.stx_attributes & attribute) != 0;
}

bool is_mount_point(const std::string& path) {
  if (const auto reported = has_attribute(path, STATX_ATTR_MOUNT_ROOT)) return *reported;
  const auto mounts = read_mounts();
  std::error_code error;
  const auto directory = std::filesystem::canonical(directory_of(path), error);
  if (!mounts || error) return false;
  const std::string whole = directory / std::filesystem::path(path).filename();
  return std::ranges::find(*mounts, whole, &Mount::point) != mounts->end();
}

// capget(2) has no wrapper in libc.
bool may_act_for_owners() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> sets{};
  if (::syscall(SYS_capget, &header, sets.data()) != 0) return true;
  return (sets[CAP_TO_INDEX(CAP_FOWNER)].effective & CAP_TO_MASK(CAP_FOWNER)) != 0;
}

std::unexpected<Error> failed(int code, const std::string& path, std::string message) {
  return std::unexpected(
      Error{.kind = ErrorKind::system, .code = code, .message = std::move(message), .path = path});
}

}  // namespace

Status check_replaceable(const std::string& path, const std::string& action) {
  const std::string directory = directory_of(path);
  if (has_attribute(directory, STATX_ATTR_APPEND).value_or(false)) {
    return failed(EPERM, path,
                  fmt::format("cannot {}: the directory {} is append-only, and nothing in it can be renamed "
                              "(EPERM); use another directory, or clear the flag (chattr -a)",
                              action, directory));
  }
  struct stat file{};
  if (::lstat(path.c_str(), &file) != 0) return {};  // the name is free
  if (is_mount_point(path)) {
    return failed(
        EBUSY, path,
        fmt::format(
            "cannot {}: it is a mount point, which no rename can replace (EBUSY); mount the directory "
            "that holds it instead (docker -v DIR:DIR, not FILE:FILE), or use another name",
            action));
  }
  struct stat around{};
  if (::stat(directory.c_str(), &around) != 0 || (around.st_mode & S_ISVTX) == 0) return {};
  const uid_t user = ::geteuid();
  if (file.st_uid == user || around.st_uid == user || may_act_for_owners()) return {};
  return failed(
      EPERM, path,
      fmt::format("cannot {}: it belongs to another user (uid {}), and in the sticky directory {} only its "
                  "owner may replace it (EPERM); use another name or another directory, or let the "
                  "owner remove it",
                  action, file.st_uid, directory));
}

}  // namespace trunkline::os
