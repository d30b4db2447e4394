#include "os/topology.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

using test::TempDirectory;

TEST(Locate, AFileItsDirectoryAndAFileToBeAreInOnePlace) {
  const TempDirectory directory;
  std::ofstream(directory.file("a")) << "x";
  const auto of_file = locate(directory.file("a"));
  const auto of_directory = locate(directory.path());
  const auto of_new = locate(directory.file("not yet"));
  ASSERT_TRUE(of_file) << of_file.error().message;
  ASSERT_TRUE(of_directory) << of_directory.error().message;
  ASSERT_TRUE(of_new) << of_new.error().message;
  for (const auto& other : {*of_directory, *of_new}) {
    EXPECT_EQ(of_file->mount, other.mount);
    EXPECT_EQ(of_file->filesystem, other.filesystem);
    EXPECT_EQ(of_file->device, other.device);
  }
  EXPECT_FALSE(of_file->filesystem.empty());
  EXPECT_FALSE(of_file->device.empty());
  EXPECT_TRUE(std::filesystem::canonical(directory.path()).string().starts_with(of_file->mount));
}

TEST(Locate, FollowsSymbolicLinks) {
  const TempDirectory directory;
  ASSERT_EQ(::symlink("/proc", directory.file("link").c_str()), 0);
  const auto location = locate(directory.file("link"));
  ASSERT_TRUE(location) << location.error().message;
  EXPECT_EQ(location->filesystem, "proc");
  EXPECT_EQ(location->mount, "/proc");
}

TEST(Locate, ARelativePathIsOfTheWorkingDirectory) {
  const auto relative = locate("no-such-file-yet");
  const auto here = locate(".");
  ASSERT_TRUE(relative) << relative.error().message;
  ASSERT_TRUE(here) << here.error().message;
  EXPECT_EQ(relative->mount, here->mount);
}

TEST(Locate, KnowsMemory) {
  struct statfs status{};
  constexpr long kTmpfsMagic = 0x01021994;
  if (::statfs("/dev/shm", &status) != 0 || status.f_type != kTmpfsMagic)
    GTEST_SKIP() << "/dev/shm is not a tmpfs on this machine";
  const auto location = locate("/dev/shm");
  ASSERT_TRUE(location) << location.error().message;
  EXPECT_EQ(location->filesystem, "tmpfs");
  EXPECT_TRUE(location->in_memory);
  EXPECT_FALSE(location->network);
}

TEST(Locate, ABlockDeviceIsItsOwn) {
  std::string node;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/block", ignored)) {
    const std::string candidate = "/dev/" + entry.path().filename().string();
    struct stat status{};
    if (::stat(candidate.c_str(), &status) == 0 && S_ISBLK(status.st_mode)) node = candidate;
  }
  if (node.empty()) GTEST_SKIP() << "no block device node in /dev";
  const auto location = locate(node);
  ASSERT_TRUE(location) << location.error().message;
  EXPECT_EQ(location->device, node);
  EXPECT_FALSE(location->in_memory);
}

TEST(Locate, FailsWhereEvenTheDirectoryIsMissing) {
  const TempDirectory directory;
  const auto location = locate(directory.file("no/such/file"));
  ASSERT_FALSE(location);
  EXPECT_EQ(location.error().code, ENOENT);
  EXPECT_NE(location.error().message.find("no/such/file"), std::string::npos);
  EXPECT_FALSE(locate(""));
}

}  // namespace
}  // namespace trunkline::os
