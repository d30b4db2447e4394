// Files in forked children, files that another thread closes, and devices with large blocks.
#include "io/file/file_core.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "support/engines.h"
#include "support/sanitizers.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

using test::TempDirectory;
using test::TestMemory;

constexpr unsigned kChildSeconds = 20;  // SIGALRM ends a child that hangs

class FileCoreTest : public test::OnEveryBackend {
 protected:
  File open_held(Op op) {
    faults_ = Faults::create();
    const Engine engine =
        make_engine({.lanes = 1, .queue_depth = 1, .block_bytes = 64 * kKiB, .faults = faults_});
    faults_->hold(op, 0, 1'000'000);
    return File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  }

  TempDirectory directory_;
  std::shared_ptr<Faults> faults_;
};

int exit_status_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST_P(FileCoreTest, AChildForkedDuringASyncDoesNotWaitForItsLock) {
  if (test::kUnderThreadSanitizer)
    GTEST_SKIP() << "the thread sanitizer supports no threads in a forked child";
  const File file = open_held(Op::sync);
  std::thread syncing([&] { EXPECT_TRUE(file.sync()); });
  while (faults_->commands(Op::sync) == 0) std::this_thread::yield();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(kChildSeconds);
    const auto synced = file.sync();  // the engine belongs to the parent
    ::_exit(!synced && synced.error().kind == ErrorKind::closed ? 0 : 1);
  }
  EXPECT_EQ(exit_status_of(child), 0);
  faults_->release();
  syncing.join();
}

TEST_P(FileCoreTest, AChildCannotTouchTheOperationsOfItsParent) {
  if (test::kUnderThreadSanitizer)
    GTEST_SKIP() << "the thread sanitizer supports no threads in a forked child";
  const File file = open_held(Op::write);
  TestMemory memory(300'000);
  std::vector<Future> futures;
  for (int index = 0; index < 4; ++index) futures.push_back(file.async_pwrite(memory.view(), 0));
  while (faults_->commands(Op::write) == 0) std::this_thread::yield();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(kChildSeconds);
    int failures = 0;
    if (futures.back().cancel()) failures |= 1;
    bool called = false;
    futures.back().on_done([&called] { called = true; });
    if (called) failures |= 2;
    if (!file.close()) failures |= 4;  // with nothing to wait for
    ::_exit(failures);
  }
  EXPECT_EQ(exit_status_of(child), 0);
  faults_->release();
  for (const Future& future : futures) EXPECT_TRUE(future.result());
}

TEST_P(FileCoreTest, EveryCloseWaitsForPendingOperations) {
  const File file = open_held(Op::write);
  TestMemory memory(4096);
  const Future future = file.async_pwrite(memory.view(), 0);
  std::thread first([&] { EXPECT_TRUE(file.close()); });
  while (file.size()) std::this_thread::yield();  // until it is being closed
  std::thread second([&] {
    EXPECT_TRUE(file.close());
    EXPECT_TRUE(future.done());
  });
  faults_->release();
  first.join();
  second.join();
}

// Filesystems with blocks larger than a page require more than the smallest block of an engine holds.
TEST_P(FileCoreTest, AnAlignmentThatDoesNotDivideTheBlock) {
  for (const std::uint64_t block_bytes : {4096U, 12288U}) {
    const Engine engine = make_engine({.lanes = 1, .block_bytes = block_bytes});
    const File file = File::open(engine, directory_.file("b"), {.mode = Mode::write}).value();
    os::DirectLimits& limits = file.core()->members.front().pair.limits;
    if (!limits.usable) GTEST_SKIP() << "no direct I/O here: " << limits.why;
    limits.offset_alignment = 8192;
    TestMemory content(300'000, 1);
    test::fill_random(content.span(), 5);
    ASSERT_EQ(file.pwrite(content.view(), 0).value(), content.size());
    TestMemory back(content.size(), 1);
    ASSERT_EQ(file.async_pread(back.view(), 0).result().value(), back.size());
    EXPECT_EQ(std::memcmp(back.data(), content.data(), back.size()), 0) << block_bytes;
    EXPECT_EQ(engine.stats().bytes_bounced, 0U);  // a slot would be too small
  }
}

INSTANTIATE_TEST_SUITE_P(Every, FileCoreTest, testing::ValuesIn(test::all_backends()), test::backend_name);

}  // namespace
}  // namespace trunkline
