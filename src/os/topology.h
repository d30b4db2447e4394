// What a path is stored on: filesystem, mount, block device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "trunkline/error.h"

namespace trunkline::os {

struct StorageLocation {
  std::string filesystem;  // "ext4", "tmpfs", "nfs4", ... as /proc/self/mountinfo names it
  std::string mount;       // mount point
  std::string source;      // what is mounted: "/dev/vda", "tmpfs", "server:/export"
  std::string device;      // block device node under the filesystem, else `source`
  bool in_memory = false;  // tmpfs, ramfs: no device
  bool network = false;    // nfs, cifs, ceph, lustre, fuse, 9p, ...: direct I/O is known to be slower there
};

// For an existing file or directory, or for the directory that would hold `path`.
Result<StorageLocation> locate(const std::string& path);

// The NUMA node of the hardware behind a block device node, "/dev/nvme0n1p2"; nullopt where that is unknown,
// or there is only one node.
std::optional<unsigned> numa_node_of(const std::string& device);

}  // namespace trunkline::os
