// Edge cases of engines and their files: sizes, modes, invalid requests, budgets, forks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "io/engine_core.h"
#include "io/lane/work_queue.h"
#include "support/engines.h"
#include "support/sanitizers.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"

namespace trunkline {
namespace {

using test::TempDirectory;
using test::TestMemory;

class EngineTest : public test::OnEveryBackend {
 protected:
  TempDirectory directory_;
};

TEST_P(EngineTest, ZeroBytesAndSingleBytes) {
  const Engine engine = make_engine();
  const File file = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  TestMemory none(0);
  EXPECT_EQ(file.pread(none.view(), 0).value(), 0U);
  EXPECT_EQ(file.pwrite(none.view(), 100).value(), 0U);
  EXPECT_EQ(file.async_pread(MemoryView{}, 5).result().value(), 0U);
  EXPECT_EQ(file.size().value(), 0U);
  TestMemory one(1, 3);
  one.data()[0] = std::byte{42};
  EXPECT_EQ(file.async_pwrite(one.view(), 9999).result().value(), 1U);
  EXPECT_EQ(file.size().value(), 10000U);
  one.data()[0] = std::byte{0};
  EXPECT_EQ(file.pread(one.view(), 9999).value(), 1U);
  EXPECT_EQ(one.data()[0], std::byte{42});
  EXPECT_EQ(file.pread(one.view(), 0).value(), 1U);  // a hole
  EXPECT_EQ(one.data()[0], std::byte{0});
  EXPECT_EQ(file.pread(one.view(), 10000).error().kind, ErrorKind::end_of_file);
}

TEST_P(EngineTest, WriteModeLeavesNoStaleTail) {
  const Engine engine = make_engine();
  TestMemory memory(100'000);
  test::fill_random(memory.span(), 1);
  ASSERT_TRUE(File::open(engine, directory_.file("a"), {.mode = Mode::write})->pwrite(memory.view(), 0));
  const File shorter = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  ASSERT_TRUE(shorter.pwrite({memory.data(), 10}, 0));
  EXPECT_EQ(shorter.size().value(), 10U);
}

TEST_P(EngineTest, ModesAreHonoured) {
  const Engine engine = make_engine();
  const std::string path = directory_.file("a");
  EXPECT_EQ(File::open(engine, path, {.mode = Mode::read}).error().code, ENOENT);
  EXPECT_EQ(File::open(engine, path, {.mode = Mode::read_write}).error().code, ENOENT);
  ASSERT_TRUE(File::open(engine, path, {.mode = Mode::create}));
  EXPECT_EQ(File::open(engine, path, {.mode = Mode::create}).error().code, EEXIST);
  const File reader = File::open(engine, path, {.mode = Mode::read}).value();
  TestMemory memory(10);
  const auto refused = reader.pwrite(memory.view(), 0);
  EXPECT_EQ(refused.error().code, EBADF);
  EXPECT_NE(refused.error().message.find("\"r+\""), std::string::npos) << refused.error().message;
  // The hint that other EBADF have is for closed files.
  EXPECT_EQ(refused.error().message.find("closed"), std::string::npos) << refused.error().message;
  EXPECT_EQ(reader.async_pwrite(memory.view(), 0).result().error().code, EBADF);
  EXPECT_FALSE(reader.truncate(0));
}

TEST_P(EngineTest, InvalidRequestsAreRejectedWithTheArgumentsName) {
  const Engine engine = make_engine();
  const File file = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  TestMemory memory(10);
  EXPECT_EQ(file.pread(memory.view(), ~std::uint64_t{0} - 3).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(file.async_pwrite(memory.view(), std::uint64_t{1} << 63).result().error().kind,
            ErrorKind::invalid_argument);
  EXPECT_EQ(file.pwrite({nullptr, 5}, 0).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(file.async_pwrite({nullptr, 5}, 0).result().error().kind, ErrorKind::invalid_argument);
  const Request no_file{.op = Op::read, .file = nullptr, .memory = memory.view(), .offset = 0};
  EXPECT_EQ(engine.submit({&no_file, 1}).front().result().error().kind, ErrorKind::invalid_argument);
}

TEST_P(EngineTest, TheBudgetIsNeverExceeded) {
  for (const std::uint64_t budget : {std::uint64_t{0}, 64 * kKiB, 512 * kKiB, 4 * kMiB}) {
    const Engine engine =
        make_engine({.lanes = 2, .queue_depth = 16, .block_bytes = 64 * kKiB, .pinned_budget_bytes = budget});
    const File file = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
    TestMemory memory(3'000'001, 64);
    test::fill_random(memory.span(), budget);
    ASSERT_TRUE(file.pwrite(memory.view(), 7));
    TestMemory back(memory.size(), 1);
    ASSERT_TRUE(file.pread(back.view(), 7));
    EXPECT_EQ(std::memcmp(memory.data(), back.data(), memory.size()), 0);
    EXPECT_LE(engine.stats().peak_pinned_bytes, budget);
    const auto too_much = engine.allocate(budget + 1);
    EXPECT_EQ(too_much.error().kind, ErrorKind::out_of_budget);
    EXPECT_LE(engine.stats().peak_pinned_bytes, budget);
  }
}

TEST_P(EngineTest, BuffersReturnTheirBytes) {
  const Engine engine = make_engine({.lanes = 1, .pinned_budget_bytes = 8 * kMiB});
  {
    const Buffer buffer = engine.allocate(3 * kMiB + 1).value();
    EXPECT_EQ(buffer.size(), 3 * kMiB + 1);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 4096, 0U);
    EXPECT_EQ(engine.stats().pinned_bytes, 3 * kMiB + 4096);
    EXPECT_FALSE(engine.allocate(6 * kMiB));
  }
  EXPECT_EQ(engine.stats().pinned_bytes, 0U);
  EXPECT_TRUE(engine.allocate(6 * kMiB));
}

TEST_P(EngineTest, ManyOperationsAndCallbacks) {
  const Engine engine = make_engine({.lanes = 2, .queue_depth = 4, .block_bytes = 4096});
  const File file = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  constexpr std::size_t kReads =
      10'000;  // more than the queue's bound: submitting must wait for room, and return
  TestMemory memory(4096 * kReads);
  ASSERT_TRUE(file.pwrite({memory.data(), 4096}, 0));
  std::atomic<int> called{0};
  std::vector<Request> requests;
  for (std::size_t index = 0; index < kReads; ++index)
    requests.push_back(
        {.op = Op::read, .file = &file, .memory = {memory.data() + index * 4096, 4096}, .offset = 0});
  auto futures = engine.submit(requests);
  for (Future& future : futures) future.on_done([&called] { ++called; });
  EXPECT_EQ(wait_all(futures).value(), 4096U * kReads);
  engine.close();  // lanes have run their callbacks
  EXPECT_EQ(called.load(), 10'000);
  int late = 0;
  futures[0].on_done([&late] { ++late; });
  EXPECT_EQ(late, 1);
}

TEST_P(EngineTest, StatsCountBytesByIoPath) {
  const Engine engine = make_engine();
  const File file = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  TestMemory memory(2 * kMiB);
  ASSERT_TRUE(file.async_pwrite(memory.view(), 0).result());
  ASSERT_TRUE(file.pread({memory.data(), 4096}, 0));
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.bytes_direct + stats.bytes_bounced + stats.bytes_buffered, 2 * kMiB + 4096);
  EXPECT_EQ(stats.operations, 2U);
  EXPECT_EQ(stats.inline_operations, 1U);
  EXPECT_EQ(stats.write_latency.count() + stats.read_latency.count(), stats.transfers);
  const bool direct = GetParam() != BackendKind::memory && engine.explain(directory_.path())->direct;
  EXPECT_EQ(stats.bytes_direct, direct ? 2 * kMiB + 4096 : 0);
}

TEST_P(EngineTest, LatencyLogsHoldEveryTransferWhileTheyAreKept) {
  const Engine engine = make_engine();
  const File file = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  TestMemory memory(2 * kMiB);
  ASSERT_TRUE(file.async_pwrite(memory.view(), 0).result());
  engine.core()->start_latency_logs(1000);
  const EngineStats before = engine.stats();
  ASSERT_TRUE(file.async_pwrite(memory.view(), 0).result());
  const EngineStats after = engine.stats();
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  for (const io::LatencyLog& log : engine.core()->take_latency_logs()) {
    EXPECT_EQ(log.dropped(), 0U);
    count += log.count();
    for (const auto& piece : log.pieces()) {
      for (const io::LatencyRecord& record : piece) {
        EXPECT_EQ(record.op, Op::write);
        EXPECT_LE(record.offset + record.bytes, 2 * kMiB);
        EXPECT_GT(record.submitted_ns, 0U);
        bytes += record.bytes;
      }
    }
  }
  EXPECT_EQ(count, after.transfers - before.transfers);
  EXPECT_EQ(bytes, 2 * kMiB);

  ASSERT_TRUE(file.async_pwrite(memory.view(), 0).result());
  for (const io::LatencyLog& log : engine.core()->take_latency_logs()) EXPECT_EQ(log.count(), 0U);
}

TEST_P(EngineTest, ReadsInFlightAreTheLatenciesOfReadsAddedUp) {
  const Engine engine = make_engine();
  const File file = File::open(engine, directory_.file("a"), {.mode = Mode::write}).value();
  TestMemory memory(2 * kMiB);
  EXPECT_TRUE(engine.core()->take_reads_in_flight().empty());
  engine.core()->start_reads_in_flight();
  engine.core()->start_latency_logs(1000);
  ASSERT_TRUE(file.async_pwrite(memory.view(), 0).result());
  ASSERT_TRUE(file.async_pread(memory.view(), 0).result());
  std::int64_t read_ns = 0;
  double byte_ns = 0;
  for (const io::LatencyLog& log : engine.core()->take_latency_logs()) {
    for (const auto& piece : log.pieces()) {
      for (const io::LatencyRecord& record : piece) {
        if (record.op != Op::read) continue;
        read_ns += static_cast<std::int64_t>(record.took_ns);
        byte_ns += static_cast<double>(record.took_ns) * static_cast<double>(record.bytes);
      }
    }
  }
  io::InFlightBucket sum;
  for (const io::ReadsInFlight& each : engine.core()->take_reads_in_flight()) {
    for (const io::InFlightBucket& bucket : each.sums().buckets()) sum += bucket;
  }
  EXPECT_GT(read_ns, 0);
  EXPECT_EQ(sum.read_ns, read_ns);
  EXPECT_NEAR(sum.byte_ns, byte_ns, byte_ns * 1e-9);
  EXPECT_TRUE(engine.core()->take_reads_in_flight().empty());
}

TEST(LatencyLog, KeepsNoMoreThanItsLimit) {
  io::LatencyLog log(20'000);
  for (std::uint64_t each = 0; each < 20'003; ++each) log.add({.took_ns = each});
  EXPECT_EQ(log.count(), 20'000U);
  EXPECT_EQ(log.dropped(), 3U);
  EXPECT_EQ(log.pieces().back().back().took_ns, 19'999U);
}

INSTANTIATE_TEST_SUITE_P(Every, EngineTest, testing::ValuesIn(test::all_backends()), test::backend_name);

TEST(EngineOptions, OutOfRangeIsRejectedWithTheOptionsName) {
  const auto expect = [](const EngineOptions& options, std::string_view name) {
    const auto engine = Engine::create(options);
    ASSERT_FALSE(engine);
    EXPECT_EQ(engine.error().kind, ErrorKind::invalid_argument);
    EXPECT_EQ(engine.error().message.find(name), 0U) << engine.error().message;
  };
  expect({.lanes = 0}, "lanes");
  expect({.lanes = 65}, "lanes");
  expect({.queue_depth = 0}, "queue_depth");
  expect({.pinned_budget_bytes = 100}, "pinned_budget_bytes");
  expect({.pinned_budget_bytes = std::uint64_t{1} << 60}, "pinned_budget_bytes");
  expect({.block_bytes = 1000}, "block_bytes");
  expect({.block_bytes = 0}, "block_bytes");
  EXPECT_EQ(parse_backend("aio").error().kind, ErrorKind::invalid_argument);
  for (const BackendKind kind : test::all_backends()) EXPECT_EQ(parse_backend(to_string(kind)).value(), kind);
}

TEST(WorkQueue, AcceptsNoMoreThanItsBound) {
  io::WorkQueue queue(4096, 3);
  std::vector<std::shared_ptr<Operation>> operations(
      5, std::make_shared<Operation>(Op::read, nullptr, nullptr, MemoryView{}, 0, nullptr));
  EXPECT_EQ(queue.push(operations), 3U);
  EXPECT_EQ(queue.push(operations, std::chrono::milliseconds(1)), 0U);  // the caller may give up
  std::thread closer([&queue] { queue.close(); });
  EXPECT_EQ(queue.push(operations), 0U);  // waits for room until the queue is closed
  closer.join();
}

TEST(LargeFiles, SparseReadsAndWritesBeyondFourGiB) {
  const TempDirectory directory;
  const Engine engine = Engine::create().value();
  const File file = File::open(engine, directory.file("sparse"), {.mode = Mode::write}).value();
  const std::uint64_t far = 5 * kGiB + 12345;
  TestMemory memory(kMiB + 17, 5);
  test::fill_random(memory.span(), 9);
  ASSERT_TRUE(file.async_pwrite(memory.view(), far).result());
  EXPECT_EQ(file.size().value(), far + memory.size());
  TestMemory back(memory.size());
  ASSERT_TRUE(file.pread(back.view(), far));
  EXPECT_EQ(std::memcmp(memory.data(), back.data(), memory.size()), 0);
  ASSERT_TRUE(file.pread(back.view(), 3 * kGiB + 1));
  EXPECT_TRUE(std::ranges::all_of(back.span(), [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(Files, OnlyRegularFilesAndBlockDevicesAreOpened) {
  const TempDirectory directory;
  const Engine engine = Engine::create().value();
  EXPECT_EQ(File::open(engine, directory.path()).error().code, EISDIR);
  EXPECT_EQ(File::open(engine, "/dev/null").error().kind, ErrorKind::unsupported);
  ASSERT_EQ(::mkfifo(directory.file("fifo").c_str(), 0600), 0);
  EXPECT_EQ(File::open(engine, directory.file("fifo")).error().kind, ErrorKind::unsupported);
}

TEST(Files, AFullDiskIsReportedBeforeAnythingIsWritten) {
  const TempDirectory directory;
  const Engine engine = Engine::create().value();
  std::error_code ignored;
  const auto room = std::filesystem::space(directory.path(), ignored);
  const File file = File::open(engine, directory.file("full"), {.mode = Mode::write}).value();
  TestMemory memory(3 * kMiB);
  // A write cannot reach its filesystem's largest offset: this fails like a full disk, without filling one.
  const auto result = file.async_pwrite(memory.view(), (std::uint64_t{1} << 62)).result();
  ASSERT_FALSE(result);
  EXPECT_TRUE(result.error().code == EFBIG || result.error().code == ENOSPC || result.error().code == EINVAL)
      << result.error().message;
  EXPECT_EQ(file.size().value(), 0U);
  EXPECT_GT(room.capacity, 0U);
}

TEST(Fork, AnOperationOfTheParentIsDoneInTheChild) {
  if (test::kUnderThreadSanitizer)
    GTEST_SKIP() << "the thread sanitizer supports no threads in a forked child";
  const TempDirectory directory;
  const auto faults = Faults::create();
  const Engine engine = Engine::create({.lanes = 1, .faults = faults}).value();
  const File file = File::open(engine, directory.file("a"), {.mode = Mode::write}).value();
  TestMemory memory(3 * kMiB);
  ASSERT_TRUE(file.pwrite(memory.view(), 0));
  const Future ended = file.async_pread(memory.view(), 0);
  ASSERT_TRUE(ended.wait());
  faults->hold(Op::read, faults->commands(Op::read), 1000);
  const Future held = file.async_pread(memory.view(), 0);

  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int failures = 0;
    if (!held.done() || !held.wait()) failures |= 1;
    const auto result = held.result();
    if (result || result.error().kind != ErrorKind::closed) failures |= 2;
    if (ended.result() != memory.size()) failures |= 4;
    ::_exit(failures);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  faults->release();
  EXPECT_EQ(held.result(), memory.size());
}

TEST(Fork, TheDefaultEngineWorksInAChild) {
  if (test::kUnderThreadSanitizer)
    GTEST_SKIP() << "the thread sanitizer supports no threads in a forked child";
  const TempDirectory directory;
  const File file = File::open(directory.file("a"), {.mode = Mode::write}).value();
  TestMemory memory(3 * kMiB);
  test::fill_random(memory.span(), 4);
  ASSERT_TRUE(file.pwrite(memory.view(), 0));
  const Engine explicit_engine = Engine::create().value();
  const File explicit_file = File::open(explicit_engine, directory.file("a")).value();
  std::vector<TestMemory> pending_memory;
  for (int index = 0; index < 8; ++index) pending_memory.emplace_back(memory.size());
  std::vector<Future> pending;
  for (TestMemory& target : pending_memory) pending.push_back(file.async_pread(target.view(), 0));

  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    TestMemory back(memory.size());
    int failures = 0;
    if (!file.async_pread(back.view(), 0).result() ||
        std::memcmp(back.data(), memory.data(), back.size()) != 0)
      failures |= 1;
    if (!file.pwrite({back.data(), 4096}, 0) || !file.sync() || !file.close()) failures |= 2;
    const auto refused = explicit_file.async_pread(back.view(), 0).result();
    if (refused || refused.error().kind != ErrorKind::closed) failures |= 4;
    const auto refused_inline = explicit_file.pread({back.data(), 10}, 0);
    if (refused_inline || refused_inline.error().kind != ErrorKind::closed) failures |= 8;
    ::_exit(failures);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(wait_all(pending));
}

}  // namespace
}  // namespace trunkline
