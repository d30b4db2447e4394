// A preallocation that fails while another handle writes to the same file.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <utility>
#include <vector>

#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"
#include "trunkline/units.h"

namespace {

int kernel_fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, bytes));
}

// Replaces the next fallocate(2) of this process; the one after it goes to the kernel again.
std::function<int(int, int, off_t, off_t)>& next_fallocate() {
  static std::function<int(int, int, off_t, off_t)> call;
  return call;
}

}  // namespace

// Overrides the C library's function in this executable.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t len) {
  if (!next_fallocate()) return kernel_fallocate(fd, mode, offset, len);
  const auto call = std::exchange(next_fallocate(), nullptr);
  return call(fd, mode, offset, len);
}

namespace trunkline {
namespace {

using test::TempDirectory;
using test::TestMemory;

// Two handles to one file. One writes the first half, the other the second.
class PreallocationTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kHalf = 8 * kMiB;

  PreallocationTest() {
    test::fill_random(first_data_.span(), 1);
    test::fill_random(second_data_.span(), 2);
  }
  void TearDown() override { next_fallocate() = nullptr; }

  void expect_first_half_intact() {
    TestMemory read(kHalf);
    ASSERT_EQ(first_.pread(read.view(), 0).value(), kHalf);
    EXPECT_TRUE(std::ranges::equal(read.span(), first_data_.span()));
  }

  TempDirectory directory_;
  // Each has its own engine: one can write while the other's is busy with a preallocation.
  File first_ = File::open(Engine::create().value(), directory_.file("a"), {.mode = Mode::write}).value();
  File second_ =
      File::open(Engine::create().value(), directory_.file("a"), {.mode = Mode::read_write}).value();
  TestMemory first_data_{kHalf};
  TestMemory second_data_{kHalf};
};

TEST_F(PreallocationTest, FailureKeepsWhatAnotherHandleWroteMeanwhile) {
  bool failed = false;
  next_fallocate() = [&](int fd, int mode, off_t offset, off_t bytes) {
    EXPECT_EQ(first_.pwrite(first_data_.view(), 0).value(), kHalf);
    EXPECT_EQ(kernel_fallocate(fd, mode, offset, bytes / 2), 0);  // blocks run out half way
    failed = true;
    errno = ENOSPC;
    return -1;
  };
  const auto written = second_.async_pwrite(second_data_.view(), kHalf).result();
  if (!failed) GTEST_SKIP() << "nothing is preallocated in " << directory_.path();
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, ENOSPC);
  EXPECT_NE(written.error().message.find("cannot allocate"), std::string::npos) << written.error().message;
  EXPECT_EQ(first_.size().value(), kHalf);
  expect_first_half_intact();
  // The same write succeeds once there is room.
  ASSERT_EQ(second_.async_pwrite(second_data_.view(), kHalf).result().value(), kHalf);
  EXPECT_EQ(first_.size().value(), 2 * kHalf);
  expect_first_half_intact();
}

TEST_F(PreallocationTest, TheLengthChangesAfterTheAllocation) {
  ASSERT_EQ(first_.pwrite(first_data_.view(), 0).value(), kHalf);
  std::vector<int> modes;
  const auto set_length = [&](int fd, int mode, off_t offset, off_t bytes) {
    modes.push_back(mode);
    const int result = kernel_fallocate(fd, mode, offset, bytes);
    EXPECT_EQ(std::filesystem::file_size(directory_.file("a")), 2 * kHalf);
    return result;
  };
  next_fallocate() = [&](int fd, int mode, off_t offset, off_t bytes) {
    modes.push_back(mode);
    const int result = kernel_fallocate(fd, mode, offset, bytes);
    EXPECT_EQ(std::filesystem::file_size(directory_.file("a")), kHalf);
    next_fallocate() = set_length;
    return result;
  };
  ASSERT_EQ(second_.async_pwrite(second_data_.view(), kHalf).result().value(), kHalf);
  if (modes.empty()) GTEST_SKIP() << "nothing is preallocated in " << directory_.path();
  EXPECT_EQ(modes, (std::vector<int>{FALLOC_FL_KEEP_SIZE, 0}));
  EXPECT_EQ(first_.size().value(), 2 * kHalf);
  expect_first_half_intact();
}

TEST_F(PreallocationTest, WithoutSupportTheWriteGrowsTheFile) {
  next_fallocate() = [](int, int, off_t, off_t) {
    errno = EOPNOTSUPP;
    return -1;
  };
  ASSERT_EQ(second_.async_pwrite(second_data_.view(), kHalf).result().value(), kHalf);
  EXPECT_EQ(first_.size().value(), 2 * kHalf);
}

TEST_F(PreallocationTest, AFileSizeLimitAllocatesNothing) {
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small{.rlim_cur = kHalf, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto written = second_.async_pwrite(second_data_.view(), kHalf).result();
  ::setrlimit(RLIMIT_FSIZE, &before);
  (void)std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, EFBIG);
  struct stat status{};
  ASSERT_EQ(::stat(directory_.file("a").c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 0);
  EXPECT_EQ(status.st_blocks, 0);
}

}  // namespace
}  // namespace trunkline
