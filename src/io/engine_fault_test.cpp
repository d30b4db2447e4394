// Each fault at each completion, on every backend: the affected operation fails with a typed error, and no
// other fails.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "support/engines.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"

namespace trunkline {
namespace {

using test::TempDirectory;
using test::TestMemory;

constexpr std::uint64_t kBytes = 300'000;  // five blocks of 64 KiB, the last one shorter

class FaultTest : public test::OnEveryBackend {
 protected:
  void SetUp() override {
    OnEveryBackend::SetUp();
    if (IsSkipped()) return;
    test::fill_random(content_.span(), 3);
    File file = open(make_engine(), Mode::write);
    ASSERT_TRUE(file.pwrite(content_.view(), 0));
    ASSERT_TRUE(file.close());
  }

  Engine faulty_engine() {
    faults_ = Faults::create();
    return make_engine({.lanes = 1, .queue_depth = 4, .block_bytes = 64 * kKiB, .faults = faults_});
  }

  // With the memory backend, files live as long as their engine, so each new engine gets the content again.
  File open(const Engine& engine, Mode mode) {
    if (GetParam() == BackendKind::memory && mode != Mode::write) {
      File filled = File::open(engine, path_, {.mode = Mode::write}).value();
      EXPECT_TRUE(filled.pwrite(content_.view(), 0));
    }
    auto file = File::open(engine, path_, {.mode = mode});
    EXPECT_TRUE(file) << file.error().message;
    return *file;
  }

  TempDirectory directory_;
  std::string path_ = directory_.file("data");
  TestMemory content_{kBytes};
  std::shared_ptr<Faults> faults_;
};

TEST_P(FaultTest, AnErrorAtAnyCompletionOfAReadFailsOnlyThatRead) {
  for (const int code : {EIO, ENOSPC, EBADF, ENOMEM}) {
    const Engine engine = faulty_engine();
    const File file = open(engine, Mode::read);
    const std::uint64_t before = faults_->commands(Op::read);
    TestMemory probe(kBytes);
    ASSERT_TRUE(file.async_pread(probe.view(), 0).result());
    const std::uint64_t commands = faults_->commands(Op::read) - before;
    ASSERT_GE(commands, 5U);
    for (std::uint64_t at = 0; at < commands; ++at) {
      faults_->fail(Op::read, faults_->commands(Op::read) + at, code);
      TestMemory memory(kBytes);
      const auto result = file.async_pread(memory.view(), 0).result();
      ASSERT_FALSE(result) << "completion " << at;
      EXPECT_EQ(result.error().code, code);
      EXPECT_EQ(result.error().path, path_);
      // Commands dropped after the error leave the fault armed for a later command: use it up.
      while (!file.async_pread(memory.view(), 0).result()) {
      }
      EXPECT_EQ(std::memcmp(memory.data(), content_.data(), kBytes), 0);
    }
    EXPECT_GE(engine.stats().errors, commands);
  }
}

TEST_P(FaultTest, AnErrorAtAnyCompletionOfAWriteFailsIt) {
  for (std::uint64_t at = 0; at < 5; ++at) {
    const Engine engine = faulty_engine();
    const File file = open(engine, Mode::read_write);
    faults_->fail(Op::write, faults_->commands(Op::write) + at, ENOSPC);
    const auto result = file.async_pwrite(content_.view(), 0).result();
    ASSERT_FALSE(result) << "completion " << at;
    EXPECT_EQ(result.error().code, ENOSPC);
    EXPECT_NE(result.error().message.find("ENOSPC"), std::string::npos);
    ASSERT_TRUE(file.async_pwrite(content_.view(), 0).result());
    TestMemory back(kBytes);
    ASSERT_TRUE(file.pread(back.view(), 0));
    EXPECT_EQ(std::memcmp(back.data(), content_.data(), kBytes), 0);
  }
}

TEST_P(FaultTest, ShortResultsAtAnyCompletionAreResumed) {
  for (const std::uint64_t bytes : {1ULL, 511ULL, 512ULL, 4096ULL, 5000ULL, 65535ULL}) {
    for (std::uint64_t at = 0; at < 5; ++at) {
      const Engine engine = faulty_engine();
      const File file = open(engine, Mode::read_write);
      faults_->shorten(Op::read, faults_->commands(Op::read) + at, bytes);
      TestMemory memory(kBytes);
      const auto read = file.async_pread(memory.view(), 0).result();
      ASSERT_TRUE(read) << read.error().message;
      EXPECT_EQ(std::memcmp(memory.data(), content_.data(), kBytes), 0)
          << bytes << " bytes at completion " << at;
      faults_->shorten(Op::write, faults_->commands(Op::write) + at, bytes);
      TestMemory changed(kBytes);
      test::fill_random(changed.span(), bytes + at);
      const auto written = file.async_pwrite(changed.view(), 0).result();
      ASSERT_TRUE(written) << written.error().message;
      ASSERT_TRUE(file.async_pread(memory.view(), 0).result());
      EXPECT_EQ(std::memcmp(memory.data(), changed.data(), kBytes), 0)
          << bytes << " bytes at completion " << at;
      ASSERT_TRUE(file.async_pwrite(content_.view(), 0).result());
      const bool cut = bytes < 64 * kKiB && (at < 4 || bytes < kBytes % (64 * kKiB));
      EXPECT_EQ(engine.stats().short_resumes > 0, cut);
    }
  }
}

TEST_P(FaultTest, InterruptionsAreRetried) {
  const Engine engine = faulty_engine();
  const File file = open(engine, Mode::read);
  const std::uint64_t now = faults_->commands(Op::read);
  faults_->fail(Op::read, now, EINTR, 3);
  faults_->fail(Op::read, now + 4, EAGAIN, 3);
  TestMemory memory(kBytes);
  ASSERT_TRUE(file.async_pread(memory.view(), 0).result());
  EXPECT_EQ(std::memcmp(memory.data(), content_.data(), kBytes), 0);
  EXPECT_EQ(engine.stats().retries, 6U);
}

TEST_P(FaultTest, RejectedDirectIoFallsBackAndIsReported) {
  const Engine engine = faulty_engine();
  const File file = open(engine, Mode::read_write);
  const auto before = engine.stats();
  faults_->fail(Op::read, faults_->commands(Op::read), EINVAL);
  TestMemory memory(kBytes);
  const auto result = file.async_pread(memory.view(), 0).result();
  if (!engine.explain(directory_.path())->direct || GetParam() == BackendKind::memory) {
    EXPECT_FALSE(result);  // there was no direct I/O to fall back from
    return;
  }
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(std::memcmp(memory.data(), content_.data(), kBytes), 0);
  EXPECT_EQ(engine.stats().direct_refusals, before.direct_refusals + 1);
  ASSERT_TRUE(file.pread(memory.view(), 0));
  EXPECT_EQ(engine.stats().direct_refusals, before.direct_refusals + 1) << "direct I/O was tried again";
}

TEST_P(FaultTest, AFailedSyncIsFinal) {
  const Engine engine = faulty_engine();
  const File file = open(engine, Mode::read_write);
  faults_->fail(Op::sync, 0, EIO);
  const auto first = file.sync();
  ASSERT_FALSE(first);
  EXPECT_EQ(first.error().code, EIO);
  EXPECT_FALSE(file.sync()) << "a later fsync would succeed although data may be lost";
  EXPECT_FALSE(file.pwrite(content_.view(), 0));
  TestMemory memory(kBytes);
  EXPECT_TRUE(file.pread(memory.view(), 0));
  EXPECT_TRUE(file.close());
}

TEST_P(FaultTest, FaultsReachSmallBlockingOperations) {
  const Engine engine = faulty_engine();
  const File file = open(engine, Mode::read);
  TestMemory memory(4096);
  faults_->fail(Op::read, faults_->commands(Op::read), EIO);
  EXPECT_EQ(file.pread(memory.view(), 0).error().code, EIO);
  faults_->shorten(Op::read, faults_->commands(Op::read), 7);
  ASSERT_TRUE(file.pread(memory.view(), 0));
  EXPECT_EQ(std::memcmp(memory.data(), content_.data(), 4096), 0);
}

TEST_P(FaultTest, CancelDropsUnsentTransfersAndAwaitsTheRest) {
  const Engine engine = faulty_engine();
  const File file = open(engine, Mode::read);
  faults_->hold(Op::read, faults_->commands(Op::read), 1000);
  const std::uint64_t before = faults_->commands(Op::read);
  auto memory = std::make_shared<TestMemory>(kBytes);
  const std::weak_ptr<TestMemory> alive = memory;
  const MemoryView view = memory->view();
  Future future = file.async_pread(view, 0, std::move(memory));
  EXPECT_FALSE(future.wait(std::chrono::milliseconds(1)));
  const auto timed_out = future.result(std::chrono::milliseconds(1));
  EXPECT_EQ(timed_out.error().kind, ErrorKind::timed_out);
  while (faults_->commands(Op::read) - before < 4) std::this_thread::yield();  // the lane is full now
  EXPECT_TRUE(future.cancel());
  EXPECT_FALSE(future.done()) << "the kernel may still write to the memory";
  EXPECT_FALSE(alive.expired());
  EXPECT_FALSE(future.cancel()) << "nothing is left to drop";
  faults_->release();
  const auto result = future.result();
  EXPECT_EQ(result.error().kind, ErrorKind::cancelled);
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(faults_->commands(Op::read) - before, 4U);
}

TEST_P(FaultTest, CancelOfAQueuedOperationEndsItAtOnce) {
  const Engine engine = faulty_engine();
  const File file = open(engine, Mode::read);
  faults_->hold(Op::read, faults_->commands(Op::read), 1000);
  TestMemory first(kBytes);
  TestMemory second(kBytes);
  Future running = file.async_pread(first.view(), 0);
  Future queued = file.async_pread(second.view(), 0);
  EXPECT_TRUE(queued.cancel());
  EXPECT_TRUE(queued.done());
  EXPECT_EQ(queued.result().error().kind, ErrorKind::cancelled);
  faults_->release();
  EXPECT_TRUE(running.result());
  EXPECT_FALSE(running.cancel());
}

TEST_P(FaultTest, ClosingWaitsForPendingOperations) {
  const Engine engine = faulty_engine();
  File file = open(engine, Mode::read);
  faults_->hold(Op::read, faults_->commands(Op::read), 1000);
  TestMemory memory(kBytes);
  const Future future = file.async_pread(memory.view(), 0);
  std::thread closer([&] { EXPECT_TRUE(file.close()); });
  faults_->release();
  closer.join();
  EXPECT_TRUE(future.done());
  EXPECT_TRUE(future.result());
  EXPECT_EQ(file.pread(memory.view(), 0).error().kind, ErrorKind::closed);
  EXPECT_TRUE(file.close());
}

TEST_P(FaultTest, TheLastHandleMayBeDroppedWhileOperationsArePending) {
  TestMemory memory(kBytes);
  Future future;
  {
    const Engine engine = faulty_engine();
    const File file = open(engine, Mode::read);
    // While commands are held, the operation is the last owner of file and engine; a lane then destroys them.
    faults_->hold(Op::read, faults_->commands(Op::read), 1000);
    future = file.async_pread(memory.view(), 0);
  }
  faults_->release();
  ASSERT_TRUE(future.result());
  EXPECT_EQ(std::memcmp(memory.data(), content_.data(), kBytes), 0);
}

TEST_P(FaultTest, EngineCloseFinishesWhatWasSubmitted) {
  const Engine engine = faulty_engine();
  const File file = open(engine, Mode::read);
  std::vector<TestMemory> memories;
  std::vector<Future> futures;
  for (int index = 0; index < 20; ++index) memories.emplace_back(kBytes);
  for (TestMemory& memory : memories) futures.push_back(file.async_pread(memory.view(), 0));
  engine.close();
  for (const Future& future : futures) {
    EXPECT_TRUE(future.done());
    EXPECT_TRUE(future.result());
  }
  EXPECT_EQ(file.async_pread(memories[0].view(), 0).result().error().kind, ErrorKind::closed);
}

INSTANTIATE_TEST_SUITE_P(Every, FaultTest, testing::ValuesIn(test::all_backends()), test::backend_name);

}  // namespace
}  // namespace trunkline
