#include "os/file_pair.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

TEST(FilePair, ARefusedOpeningKeepsTheContentsAndLeavesNoFile) {
  const std::string root = "/dev/shm";  // files in memory have no direct I/O
  if (::access(root.c_str(), W_OK) != 0) GTEST_SKIP() << "no writable tmpfs at /dev/shm";
  const std::string path = root + "/trunkline-file-pair-" + std::to_string(::getpid());
  std::ofstream(path) << "precious";
  auto refused = open_pair(path, O_RDWR | O_CREAT | O_TRUNC, DirectPolicy::always);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::unsupported);
  EXPECT_EQ(std::filesystem::file_size(path), 8U);
  std::filesystem::remove(path);
  EXPECT_FALSE(open_pair(path, O_RDWR | O_CREAT | O_EXCL, DirectPolicy::always));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(FilePair, TruncationEmptiesTheFileThatIsOpened) {
  const test::TempDirectory directory;
  std::ofstream(directory.file("a")) << "old contents";
  const auto pair = open_pair(directory.file("a"), O_RDWR | O_CREAT | O_TRUNC, DirectPolicy::automatic);
  ASSERT_TRUE(pair) << pair.error().message;
  EXPECT_EQ(file_bytes(pair->buffered.get(), "a"), 0U);
}

}  // namespace
}  // namespace trunkline::os
