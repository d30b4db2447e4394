#include "os/topology.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>

#include "os/mountinfo.h"
#include "os/read_text.h"

namespace trunkline::os {
namespace {

bool is_in_memory(std::string_view filesystem) {
  constexpr std::array<std::string_view, 4> kNames{"tmpfs", "ramfs", "rootfs", "hugetlbfs"};
  return std::ranges::find(kNames, filesystem) != kNames.end();
}

// FUSE and virtiofs count too: like a network filesystem, they have a server between this machine's page
// cache and the disk.
bool is_network(std::string_view filesystem) {
  constexpr std::array<std::string_view, 15> kNames{"nfs",  "nfs4",    "cifs",     "smb3",     "ceph",
                                                    "9p",   "afs",     "lustre",   "beegfs",   "glusterfs",
                                                    "fuse", "fuseblk", "virtiofs", "orangefs", "ncpfs"};
  return filesystem.starts_with("fuse.") || std::ranges::find(kNames, filesystem) != kNames.end();
}

// The node ("/dev/nvme0n1p2") of a device number, nullopt where there is no such block device (or no /sys).
std::optional<std::string> block_device_node(DeviceId device) {
  if (device.major == 0) return std::nullopt;  // anonymous: tmpfs, btrfs, overlayfs, ...
  const auto text = read_text(fmt::format("/sys/dev/block/{}:{}/uevent", device.major, device.minor));
  if (!text) return std::nullopt;
  constexpr std::string_view kKey = "DEVNAME=";
  std::string_view rest = *text;
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    if (line.starts_with(kKey)) return fmt::format("/dev/{}", line.substr(kKey.size()));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
  }
  return std::nullopt;
}

std::string parent_directory(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

struct Found {
  std::string path;  // the path examined: the file, or the directory that would hold it
  struct statx status{};
};

Result<Found> stat_path_or_parent(const std::string& path) {
  constexpr unsigned kWanted = STATX_TYPE | STATX_MNT_ID;
  Found found{path};
  if (::statx(AT_FDCWD, found.path.c_str(), 0, kWanted, &found.status) == 0) return found;
  int code = errno;
  if (code == ENOENT && !path.empty()) {
    found.path = parent_directory(path);
    if (::statx(AT_FDCWD, found.path.c_str(), 0, kWanted, &found.status) == 0) return found;
    code = errno;
  }
  return std::unexpected(system_error(code, "find the filesystem of " + path, path));
}

Result<std::string> canonical(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> resolved(::realpath(path.c_str(), nullptr), &std::free);
  if (resolved == nullptr) return std::unexpected(system_error(errno, "resolve " + path, path));
  return std::string(resolved.get());
}

}  // namespace

Result<StorageLocation> locate(const std::string& path) {
  auto found = stat_path_or_parent(path);
  if (!found) return std::unexpected(found.error());
  auto resolved = canonical(found->path);
  if (!resolved) return std::unexpected(resolved.error());
  auto mounts = read_mounts();
  if (!mounts) return std::unexpected(mounts.error());

  const struct statx& status = found->status;
  const bool knows_mount = (status.stx_mask & STATX_MNT_ID) != 0;
  const DeviceId device{status.stx_dev_major, status.stx_dev_minor};
  const Mount* mount = find_mount(*mounts, {knows_mount ? status.stx_mnt_id : 0, device, *resolved});
  if (mount == nullptr) {
    return std::unexpected(make_error(ErrorKind::unsupported,
                                      fmt::format("cannot find the filesystem of {}: no mount in "
                                                  "/proc/self/mountinfo contains it; is it outside this "
                                                  "process's mount namespace?",
                                                  path),
                                      path));
  }
  StorageLocation location{mount->filesystem,
                           mount->point,
                           mount->source,
                           {},
                           is_in_memory(mount->filesystem),
                           is_network(mount->filesystem)};
  if (S_ISBLK(status.stx_mode)) {
    // The bytes are the device's own; the filesystem only holds its name.
    location.device = block_device_node({status.stx_rdev_major, status.stx_rdev_minor}).value_or(*resolved);
    location.in_memory = false;
  } else {
    // The mount's device before the file's: a file of overlayfs may report the device of a layer below.
    location.device = block_device_node(mount->device).value_or(mount->source);
  }
  return location;
}

std::optional<unsigned> numa_node_of(const std::string& device) {
  std::error_code ignored;
  const std::filesystem::path name = std::filesystem::path(device).filename();
  if (name.empty() || !device.starts_with("/dev/")) return std::nullopt;
  std::filesystem::path at = std::filesystem::canonical("/sys/class/block" / name, ignored);
  // In sysfs a partition is below its disk, the disk below its controller, and the controller below the bus
  // device.
  for (; at.has_relative_path(); at = at.parent_path()) {
    const auto text = read_text((at / "numa_node").string());
    if (!text) continue;
    unsigned node = 0;  // "-1" where the machine has one node only
    const auto [end, wrong] = std::from_chars(text->data(), text->data() + text->size(), node);
    return wrong == std::errc() ? std::optional(node) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace trunkline::os
