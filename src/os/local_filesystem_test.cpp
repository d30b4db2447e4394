#include "os/local_filesystem.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>

#include <cstdint>
#include <initializer_list>

#include "os/unique_fd.h"

namespace trunkline::os {
namespace {

TEST(LocalFilesystem, NetworkAndUserSpaceFilesystemsAreNotLocal) {
  for (const std::uint32_t type : std::initializer_list<std::uint32_t>{
           EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC})
    EXPECT_TRUE(is_local_filesystem(type));
  for (const std::uint32_t type : {NFS_SUPER_MAGIC, FUSE_SUPER_MAGIC, PROC_SUPER_MAGIC, 0})
    EXPECT_FALSE(is_local_filesystem(type));
  const UniqueFd fd(::open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  EXPECT_FALSE(is_on_local_filesystem(fd.get()));
  EXPECT_FALSE(is_on_local_filesystem(-1));
  EXPECT_FALSE(is_on_local_filesystem("/proc/self/status"));
  EXPECT_FALSE(is_on_local_filesystem("/nothing/there"));
  EXPECT_TRUE(is_on_local_filesystem("/dev/shm"));
}

}  // namespace
}  // namespace trunkline::os
