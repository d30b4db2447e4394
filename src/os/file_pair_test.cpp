#include "os/file_pair.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "os/local_filesystem.h"
#include "os/page_cache.h"
#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

TEST(FilePair, ARejectedOpenKeepsTheContentsAndLeavesNoFile) {
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

TEST(FilePair, ACachedFileIsReadThroughThePageCache) {
  const test::TempDirectory directory;
  const std::string path = directory.file("a");
  std::ofstream(path) << std::string(1 << 20, 'a');
  const auto usual = open_pair(path, O_RDONLY, DirectPolicy::automatic);
  ASSERT_TRUE(usual);
  if (!usual->limits.usable) GTEST_SKIP() << "no direct I/O here: " << usual->limits.why;
  const std::uint64_t cached_now = cached_bytes(usual->buffered.get()).value_or(0);
  if (cached_now == 0)
    GTEST_SKIP() << "the kernel does not report what is cached, at least not for this filesystem";
  EXPECT_EQ(cached_now, 1U << 20);
  const auto cached = open_pair(path, O_RDONLY, DirectPolicy::unless_cached);
  ASSERT_TRUE(cached);
  EXPECT_FALSE(cached->limits.usable);
  EXPECT_NE(cached->limits.why.find("the page cache holds"), std::string::npos);

  ASSERT_EQ(::fsync(usual->buffered.get()), 0);
  ASSERT_EQ(::posix_fadvise(usual->buffered.get(), 0, 0, POSIX_FADV_DONTNEED), 0);
  EXPECT_LT(cached_bytes(usual->buffered.get()).value_or(cached_now), 1U << 20);
  const auto cold = open_pair(path, O_RDONLY, DirectPolicy::unless_cached);
  ASSERT_TRUE(cold);
  EXPECT_TRUE(cold->limits.usable);
  EXPECT_EQ(cold->limits.why, usual->limits.why);
}

TEST(FilePair, ACachedLookupOpensTheSameFileOrReportsThatItWouldWait) {
  const test::TempDirectory directory;
  const std::string path = directory.file("a");
  std::ofstream(path) << "abc";
  const auto pair = open_pair(path, O_RDONLY, DirectPolicy::automatic, 0, Lookup::cached);
  if (!pair && pair.error().code == EAGAIN) GTEST_SKIP() << "no openat2() with RESOLVE_CACHED (Linux 5.12)";
  ASSERT_TRUE(pair) << pair.error().message;
  EXPECT_EQ(file_bytes(pair->buffered.get(), path), 3U);
  EXPECT_EQ(pair->limits.usable, open_pair(path, O_RDONLY, DirectPolicy::automatic)->limits.usable);
  // The kernel may or may not know that the file does not exist.
  const auto absent = open_pair(directory.file("b"), O_RDONLY, DirectPolicy::automatic, 0, Lookup::cached);
  ASSERT_FALSE(absent);
  EXPECT_TRUE(absent.error().code == ENOENT || absent.error().code == EAGAIN) << absent.error().message;
}

TEST(FilePair, ReportsWhetherTheFileIsLocal) {
  const test::TempDirectory directory;
  std::ofstream(directory.file("a")) << "x";
  const auto pair = open_pair(directory.file("a"), O_RDONLY, DirectPolicy::automatic);
  ASSERT_TRUE(pair) << pair.error().message;
  EXPECT_EQ(pair->local, is_on_local_filesystem(pair->buffered.get()));
  const auto remote = open_pair("/proc/self/status", O_RDONLY, DirectPolicy::never);
  ASSERT_TRUE(remote) << remote.error().message;
  EXPECT_FALSE(remote->local);
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
