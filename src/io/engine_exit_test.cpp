// Process exit with operations in flight: it waits as long as they make progress, and no longer.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "io/engine_core.h"
#include "os/unique_fd.h"
#include "support/engines.h"
#include "support/sanitizers.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"

namespace trunkline {
namespace {

using test::TempDirectory;
using test::TestMemory;

constexpr std::uint64_t kBlock = 64 * kKiB;
constexpr std::uint64_t kBlocks = 5;

class ExitTest : public test::OnEveryBackend {
 protected:
  void SetUp() override {
    OnEveryBackend::SetUp();
    if (IsSkipped()) return;
    engine_ = make_engine({.lanes = 2, .queue_depth = 1, .block_bytes = kBlock, .faults = faults_});
    file_ = File::open(engine_, directory_.file("data"), {.mode = Mode::write}).value();
    ASSERT_TRUE(file_.pwrite(memory_.view(), 0));
    const EngineStats stats = engine_.stats();
    ASSERT_EQ(stats.inline_operations, 0U);
    before_ = stats.transfers;
  }

  // Starts a read of five blocks, the last of which is held.
  void start_reading() {
    faults_->hold(Op::read, faults_->commands(Op::read) + kBlocks - 1, 1);
    future_ = file_.async_pread(memory_.view(), 0);
  }

  bool close_while(const std::function<bool(std::uint64_t)>& goes_on) {
    return engine_.core()->close_while(goes_on);
  }

  TempDirectory directory_;
  TestMemory memory_{kBlocks * kBlock};
  std::shared_ptr<Faults> faults_ = Faults::create();
  Engine engine_;
  File file_;
  std::uint64_t before_ = 0;  // transfers that had completed
  Future future_;
};

TEST_P(ExitTest, TheWaitNoticesEachCompletedTransfer) {
  start_reading();
  std::uint64_t seen = before_;
  EXPECT_FALSE(close_while([&](std::uint64_t completed) {
    EXPECT_GE(completed, seen);
    seen = completed;
    return seen - before_ < kBlocks - 1;  // no more can complete
  }));
  EXPECT_EQ(seen - before_, kBlocks - 1);
  EXPECT_FALSE(future_.done());
  faults_->release();
  EXPECT_TRUE(close_while([](std::uint64_t) { return true; }));
  EXPECT_TRUE(future_.result());
}

TEST_P(ExitTest, AnAbandonedWaitCanBeResumed) {
  start_reading();
  EXPECT_FALSE(close_while([](std::uint64_t) { return false; }));
  EXPECT_FALSE(close_while([](std::uint64_t) { return false; }));
  faults_->release();
  engine_.close();
  EXPECT_TRUE(close_while([](std::uint64_t) { return false; }));
  EXPECT_TRUE(future_.result());
}

TEST_P(ExitTest, ADeviceThatOnlyReturnsEagainMakesNoProgress) {
  constexpr std::uint64_t kForGood = 1'000'000'000;
  const std::uint64_t first = faults_->commands(Op::read);
  faults_->fail(Op::read, first, EINTR, 3);
  faults_->hold(Op::read, first + 3, kForGood);
  future_ = file_.async_pread({memory_.data(), kBlock}, 0);
  std::uint64_t most = 0;
  EXPECT_FALSE(close_while([&](std::uint64_t completed) {
    most = completed;
    return faults_->commands(Op::read) < first + 4;
  }));
  EXPECT_EQ(most, before_);
  faults_->release();
  EXPECT_TRUE(future_.result());
}

INSTANTIATE_TEST_SUITE_P(Backends, ExitTest, testing::ValuesIn(test::all_backends()), test::backend_name);

// Memory whose pages never become available: writing to it blocks forever, like a device that does not
// respond.
std::byte* absent_memory(std::uint64_t bytes) {
  const auto handler = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
  if (handler < 0) return nullptr;
  uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
  if (::ioctl(handler, UFFDIO_API, &api) != 0) return nullptr;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uffdio_register range{.range = {.start = reinterpret_cast<std::uint64_t>(memory), .len = bytes},
                        .mode = UFFDIO_REGISTER_MODE_MISSING,
                        .ioctls = 0};
  if (memory == MAP_FAILED || ::ioctl(handler, UFFDIO_REGISTER, &range) != 0) return nullptr;
  return static_cast<std::byte*>(memory);
}

constexpr int kNoAbsentMemory = 77;

// Runs in a child process.
[[noreturn]] void exit_with_a_hung_read(const std::string& path, int error_output) {
  ::dup2(error_output, STDERR_FILENO);
  ::setenv("TRUNKLINE_EXIT_TIMEOUT", "0.2", 1);  // NOLINT(concurrency-mt-unsafe): the child has one thread
  std::byte* memory = absent_memory(kBlock);
  if (memory == nullptr) ::_exit(kNoAbsentMemory);
  const File file = File::open(path).value();
  const Future future = file.async_pread({memory, kBlock}, 0);
  std::exit(EXIT_SUCCESS);  // NOLINT(concurrency-mt-unsafe)
}

TEST(Exit, AProcessWhoseDeviceHangsEndsAndReportsIt) {
  if (test::kUnderThreadSanitizer)
    GTEST_SKIP() << "the thread sanitizer supports no threads in a forked child";
  const TempDirectory directory;
  const std::string path = directory.file("data");
  TestMemory memory(kBlock);
  {
    const File file = File::open(path, {.mode = Mode::write}).value();
    ASSERT_TRUE(file.pwrite(memory.view(), 0));
  }
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const os::UniqueFd output(ends[0]);
  os::UniqueFd input(ends[1]);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) exit_with_a_hung_read(path, input.get());
  input.reset();
  std::string text;
  std::array<char, 4096> part{};
  for (ssize_t got = 0; (got = ::read(output.get(), part.data(), part.size())) > 0;)
    text.append(part.data(), static_cast<std::size_t>(got));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNoAbsentMemory)
    GTEST_SKIP() << "no userfaultfd (root only) to make memory that never arrives";
  EXPECT_EQ(WEXITSTATUS(status), EXIT_FAILURE);
  EXPECT_TRUE(text.starts_with("trunkline: no progress for 0.2 s: ")) << text;
}

}  // namespace
}  // namespace trunkline
