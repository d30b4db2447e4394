// The mounts that this process sees, from /proc/self/mountinfo (proc_pid_mountinfo(5)).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::os {

// In the form that statx(2) and mountinfo use.
struct DeviceId {
  unsigned major = 0;
  unsigned minor = 0;
  bool operator==(const DeviceId&) const = default;
};

struct Mount {
  std::uint64_t id = 0;
  DeviceId device;
  std::string point;
  std::string filesystem;
  std::string source;
};

// What is known about a file whose mount is sought.
struct MountQuery {
  std::uint64_t mount_id = 0;  // of STATX_MNT_ID; 0 where the kernel (before 5.8) does not report it
  DeviceId device;             // stx_dev_major, stx_dev_minor
  std::string path;            // absolute, without symbolic links
};

// In the order of the text, which is the order of mounting. Malformed lines are skipped.
std::vector<Mount> parse_mountinfo(std::string_view text);

// The mount that contains `query`, nullptr if none fits. The mount id decides where known. Otherwise the
// deepest mount point above the path wins (of two at one point the later, which covers the earlier): first
// among those of the same device, since a mount can hide below another; then among all, since files of btrfs
// subvolumes and of overlayfs report device ids of their own.
const Mount* find_mount(const std::vector<Mount>& mounts, const MountQuery& query);

Result<std::vector<Mount>> read_mounts();

}  // namespace trunkline::os
