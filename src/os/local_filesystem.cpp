#include "os/local_filesystem.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include "os/filesystem_magic.h"

namespace trunkline::os {

bool is_local_filesystem(std::uint32_t type) {
  switch (type) {
    case EXT4_SUPER_MAGIC:  // ext2 and ext3 as well
    case XFS_SUPER_MAGIC:
    case BTRFS_SUPER_MAGIC:
    case F2FS_SUPER_MAGIC:
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case HUGETLBFS_MAGIC:
    case OVERLAYFS_SUPER_MAGIC:
    case kZfsMagic:
    case kBcachefsMagic:
      return true;
    default:
      return false;
  }
}

bool is_on_local_filesystem(int fd) {
  struct statfs status{};
  return ::fstatfs(fd, &status) == 0 && is_local_filesystem(static_cast<std::uint32_t>(status.f_type));
}

bool is_on_local_filesystem(const std::string& path) {
  struct statfs status{};
  return ::statfs(path.c_str(), &status) == 0 &&
         is_local_filesystem(static_cast<std::uint32_t>(status.f_type));
}

}  // namespace trunkline::os
