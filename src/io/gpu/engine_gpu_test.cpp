// Transfers between files and GPU memory, through the bounce buffers: with every call of the driver failing,
// in the order of the caller's streams, cancelled, forked, short of memory.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <thread>

#include "device/device.h"
#include "io/gpu/gpu_fixture.h"
#include "support/sanitizers.h"

namespace trunkline {
namespace {

using namespace std::chrono_literals;
using test::expect_left;
using test::GpuContext;
using test::GpuMemory;
using test::GpuStream;
using test::GpuTest;
using test::random_bytes;

constexpr int kOutOfMemory = 2;

TEST_F(GpuTest, AWriteRunsAfterTheCallersStream) {
  const Engine made = engine();
  const File target = file(made, {});
  const GpuMemory memory(3 * kMiB);
  const GpuStream stream;
  for (unsigned char value = 1; value < 6; ++value) {
    fakeCudaDelay(20'000);
    ASSERT_EQ(fakeCudaFill(memory.address(), 3 * kMiB, value, stream.handle()), 0);
    Future written = target.async_pwrite(memory.view(stream.handle()), 0);
    fakeCudaDelay(0);
    ASSERT_TRUE(written.result());
    EXPECT_EQ(contents(target), std::vector<std::byte>(3 * kMiB, std::byte{value}));
  }
}

TEST_F(GpuTest, AReadRunsAfterTheCallersStream) {
  const Engine made = engine();
  const auto bytes = random_bytes(3 * kMiB, 5);
  const File source = file(made, bytes);
  const GpuMemory memory(3 * kMiB);
  const GpuStream stream;
  fakeCudaHold(stream.handle());
  ASSERT_EQ(fakeCudaFill(memory.address(), 3 * kMiB, 7, stream.handle()), 0);
  Future read = source.async_pread(memory.view(stream.handle()), 0);
  EXPECT_FALSE(read.wait(50ms));
  fakeCudaRelease();
  ASSERT_TRUE(read.result());
  EXPECT_EQ(memory.contents(), bytes);
}

TEST_F(GpuTest, WorkOnOtherStreamsIsNotWaitedFor) {
  const Engine made = engine();
  const auto bytes = random_bytes(kMiB, 6);
  const File source = file(made, bytes);
  const GpuMemory memory(kMiB);
  const GpuMemory other(kMiB);
  const GpuStream busy;
  const GpuStream stream;
  fakeCudaHold(busy.handle());
  ASSERT_EQ(fakeCudaFill(other.address(), kMiB, 7, busy.handle()), 0);
  EXPECT_TRUE(source.async_pread(memory.view(stream.handle()), 0).wait(60s));
  EXPECT_TRUE(source.async_pwrite(memory.view(stream.handle()), 0).wait(60s));
  EXPECT_TRUE(source.async_pread(memory.view(), 0).wait(60s));
  fakeCudaRelease();
  EXPECT_EQ(memory.contents(), bytes);
  EXPECT_EQ(busy.synchronize(), 0);
}

// CU_STREAM_LEGACY and CU_STREAM_PER_THREAD, as __cuda_array_interface__ and DLPack name them.
TEST_F(GpuTest, TheDefaultStreamsComeFirstToo) {
  const Engine made = engine();
  const File target = file(made, {});
  const GpuMemory memory(kMiB, 1);
  for (const std::uintptr_t number : {0, 1, 2}) {
    SCOPED_TRACE(number);
    auto* stream = reinterpret_cast<void*>(number);
    const auto value = static_cast<unsigned char>(number + 40);
    {
      const GpuContext context(1);
      fakeCudaHold(stream);
      ASSERT_EQ(fakeCudaFill(memory.address(), kMiB, value, stream), 0);
    }
    Future written = target.async_pwrite(memory.view(stream), 0);
    EXPECT_FALSE(written.wait(20ms));
    fakeCudaRelease();
    ASSERT_TRUE(written.result());
    EXPECT_EQ(contents(target), std::vector<std::byte>(kMiB, std::byte{value}));
  }
}

TEST_F(GpuTest, AStreamOfAnotherDeviceIsRejected) {
  const Engine made = engine();
  const File target = file(made, random_bytes(kMiB, 20));
  const GpuMemory memory(kMiB, 1);
  const GpuStream stream(0);
  const auto read = target.pread(memory.view(stream.handle()), 0);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::device);
  EXPECT_NE(read.error().message.find("cuda:1"), std::string::npos) << read.error().message;
  EXPECT_EQ(target.pending(), 0U);
  EXPECT_TRUE(target.pread(memory.view(), 0));
}

TEST_F(GpuTest, ACaptureIsRejectedAndNotInvalidated) {
  const GpuMemory memory(kMiB);
  const GpuStream captured;
  const GpuStream other;
  fakeCudaCapture(captured.handle());
  const Engine made = engine();
  const File target = file(made, random_bytes(kMiB, 21));
  for (void* stream : {captured.handle(), static_cast<void*>(nullptr)}) {
    const auto read = target.pread(memory.view(stream), 0);
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().kind, ErrorKind::unsupported);
    EXPECT_NE(read.error().message.find("CUDA graph"), std::string::npos) << read.error().message;
  }
  EXPECT_TRUE(target.pread(memory.view(other.handle()), 0));
  EXPECT_TRUE(target.pwrite(memory.view(other.handle()), 0));
  EXPECT_STREQ(fakeCudaComplaints(), "");
}

// The disk keeps working while copies are in flight.
TEST_F(GpuTest, ReadsContinueDuringCopies) {
  const auto faults = Faults::create();
  const Engine made = engine({.lanes = 1, .queue_depth = 8, .faults = faults});
  const auto bytes = random_bytes(8 * kMiB, 7);
  const File source = file(made, bytes);
  const GpuMemory memory(8 * kMiB);
  const std::uint64_t before = faults->commands(Op::read);
  fakeCudaHoldCopies();
  Future read = source.async_pread(memory.view(), 0);
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (faults->commands(Op::read) < before + 8 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_GE(faults->commands(Op::read), before + 8);
  EXPECT_FALSE(read.done());
  fakeCudaRelease();
  ASSERT_TRUE(read.result());
  EXPECT_EQ(memory.contents(), bytes);
  EXPECT_EQ(fakeCudaCopies(), 8U);
}

// Each call fails in turn, until there are no more of it. Copies are slow, so that a slot that is reused too
// early, or a future that is done too early, shows.
TEST_F(GpuTest, EveryFailureOfTheDriverIsReportedAndLeavesAWorkingEngine) {
  const auto bytes = random_bytes(600'100, 8);
  const auto others = random_bytes(bytes.size(), 18);
  const char* functions[] = {"cuCtxPushCurrent_v2",  "cuStreamCreate",       "cuStreamIsCapturing",
                             "cuEventCreate",        "cuEventRecord",        "cuStreamWaitEvent",
                             "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventSynchronize"};
  const std::uint64_t streams = fakeCudaLive("streams");
  const std::uint64_t events = fakeCudaLive("events");
  for (const char* function : functions) {
    unsigned failures = 0;
    for (unsigned after = 0; after < 100; after += test::kPositionStep) {
      SCOPED_TRACE(std::string(function) + " after " + std::to_string(after));
      const GpuMemory memory(bytes.size());
      const Engine made = engine({.lanes = 1, .queue_depth = 4, .block_bytes = 64 * kKiB});
      const File target = file(made, bytes);
      fakeCudaDelay(500);
      fakeCudaFail(function, kOutOfMemory, after, 1);
      const auto read = target.pread(memory.view(), 0);
      if (read) {
        EXPECT_EQ(memory.contents(), bytes);
      }
      memory.set(others);
      const auto written = target.pwrite(memory.view(), 0);
      if (written) {
        EXPECT_EQ(contents(target), others);
      }
      for (const auto& result : {read, written}) {
        if (result) continue;
        ++failures;
        EXPECT_EQ(result.error().kind, ErrorKind::device) << result.error().message;
        EXPECT_NE(result.error().message.find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos)
            << result.error().message;
      }
      EXPECT_STREQ(fakeCudaComplaints(), "");
      const bool all_done = read && written && fakeCudaPending(function);
      fakeCudaFail(function, kOutOfMemory, 0, 0);
      ASSERT_TRUE(target.pwrite(memory.view(), 0));
      memory.set(std::vector<std::byte>(bytes.size()));
      ASSERT_TRUE(target.pread(memory.view(), 0));
      EXPECT_EQ(memory.contents(), others);
      fakeCudaReset();
      if (all_done) break;
      ASSERT_LT(after + test::kPositionStep, 100U);
    }
    EXPECT_GE(failures, 1U) << function;
  }
  expect_left("streams", streams);
  expect_left("events", events);
}

TEST_F(GpuTest, MemoryThatCannotBePinnedIsSlowerAndReported) {
  const Engine made = engine({.lanes = 1});
  const auto bytes = random_bytes(2 * kMiB, 9);
  const File target = file(made, bytes);
  const GpuMemory memory(2 * kMiB);
  fakeCudaFail("cuMemHostRegister_v2", kOutOfMemory, 0, 100);
  ASSERT_TRUE(target.pread(memory.view(), 0));
  EXPECT_EQ(memory.contents(), bytes);
  EXPECT_GT(fakeCudaPageableCopies(), 0U);
  const auto explanation = made.explain(directory_.path());
  ASSERT_TRUE(explanation);
  const bool is_reported = std::ranges::any_of(
      explanation->refused, [](const Refusal& refusal) { return refusal.what == "pinned bounce buffers"; });
  EXPECT_TRUE(is_reported);
}

TEST_F(GpuTest, ADeviceThatBreaksFailsOperationsInFlight) {
  for (unsigned after = 0; after < 6; ++after) {
    SCOPED_TRACE(after);
    const auto bytes = random_bytes(6 * kMiB, 10);
    const GpuMemory memory(bytes.size());
    {
      const Engine made = engine({.lanes = 1, .queue_depth = 4});
      const File target = file(made, bytes);
      fakeCudaBreakDuringWork(after);
      const auto read = target.async_pread(memory.view(), 0).result();
      ASSERT_FALSE(read);
      EXPECT_EQ(read.error().kind, ErrorKind::device);
      EXPECT_NE(read.error().message.find("cuda:0"), std::string::npos) << read.error().message;
      const auto again = target.pwrite(memory.view(), 0);
      ASSERT_FALSE(again);
      EXPECT_EQ(again.error().kind, ErrorKind::device);
      EXPECT_EQ(contents(target).size(), bytes.size());  // host memory continues to work
      fakeCudaReset();
    }
  }
}

TEST_F(GpuTest, ABudgetWithoutRoomForABounceBufferIsReported) {
  const Engine made = engine({.lanes = 1, .pinned_budget_bytes = 0});
  const File target = file(made, random_bytes(kMiB, 11));
  const GpuMemory memory(kMiB);
  const auto read = target.pread(memory.view(), 0);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::out_of_budget);
  EXPECT_NE(read.error().message.find("pinned_budget_bytes"), std::string::npos) << read.error().message;
}

TEST_F(GpuTest, BudgetThatIsFreedLaterIsUsed) {
  const Engine made = engine({.lanes = 1, .queue_depth = 4, .pinned_budget_bytes = 16 * kMiB});
  const auto bytes = random_bytes(kMiB, 16);
  const File target = file(made, bytes);
  const GpuMemory memory(kMiB);
  {
    const std::uint64_t room = 16 * kMiB - made.stats().pinned_bytes;
    const auto taken = made.allocate(room);
    ASSERT_TRUE(taken);
    const auto read = target.pread(memory.view(), 0);
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().kind, ErrorKind::out_of_budget);
  }
  ASSERT_TRUE(target.pread(memory.view(), 0));
  EXPECT_EQ(memory.contents(), bytes);
}

// Two slots for everything: transfers of two devices and of the host alternate.
TEST_F(GpuTest, FewSlotsAreEnough) {
  const Engine made = engine({.lanes = 1, .queue_depth = 16, .pinned_budget_bytes = 8 * kMiB});
  const auto bytes = random_bytes(6 * kMiB + 5, 17);
  const File source = file(made, bytes);
  const GpuMemory memories[] = {GpuMemory(bytes.size(), 0), GpuMemory(bytes.size(), 1)};
  std::vector<std::byte> on_host(bytes.size() + 1);
  fakeCudaDelayUpTo(1000);
  std::vector<Future> futures;
  for (const GpuMemory& memory : memories) futures.push_back(source.async_pread(memory.view(), 0));
  futures.push_back(source.async_pread({on_host.data() + 1, bytes.size()}, 0));
  ASSERT_TRUE(wait_all(futures));
  for (const GpuMemory& memory : memories) EXPECT_EQ(memory.contents(), bytes);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), on_host.begin() + 1));
  EXPECT_EQ(fakeCudaPageableCopies(), 0U);  // one registration serves both devices
  EXPECT_LE(made.stats().peak_pinned_bytes, 8 * kMiB);
}

TEST_F(GpuTest, BounceBuffersAreCountedAndReleased) {
  const std::uint64_t streams = fakeCudaLive("streams");
  const std::uint64_t registrations = fakeCudaLive("registrations");
  const std::uint64_t events = fakeCudaLive("events");
  {
    const Engine made = engine({.lanes = 2, .pinned_budget_bytes = 64 * kMiB});
    const auto bytes = random_bytes(20 * kMiB, 12);
    const File target = file(made, bytes);
    const GpuMemory memory(20 * kMiB);
    ASSERT_TRUE(target.pread(memory.view(), 0));
    ASSERT_TRUE(target.pwrite(memory.view(), 0));
    EXPECT_GT(made.stats().pinned_bytes, 0U);
    EXPECT_LE(made.stats().peak_pinned_bytes, 64 * kMiB);
    EXPECT_GT(fakeCudaLive("streams"), streams);
    EXPECT_GT(fakeCudaLive("registrations"), registrations);
  }
  expect_left("streams", streams);
  expect_left("registrations", registrations);
  expect_left("events", events);
}

TEST_F(GpuTest, CancelledAndAbandonedOperationsEnd) {
  const auto bytes = random_bytes(16 * kMiB, 13);
  const GpuMemory memory(bytes.size());
  const GpuMemory other(bytes.size());
  for (const bool cancelled : {true, false}) {
    const Engine made = engine({.lanes = 1, .queue_depth = 2});
    const File target = file(made, bytes);
    fakeCudaHoldCopies();
    Future read = target.async_pread(memory.view(), 0);
    Future written = target.async_pwrite(other.view(), bytes.size());
    while (fakeCudaCopies() == 0) std::this_thread::yield();
    if (cancelled) {
      read.cancel();
      written.cancel();
      // Transfers in flight touch the memory: neither operation is done before they end.
      EXPECT_FALSE(read.done() && written.done());
      fakeCudaRelease();
      for (const auto& future : {read, written}) {
        const auto result = future.result();
        if (!result) {
          EXPECT_EQ(result.error().kind, ErrorKind::cancelled) << result.error().message;
        }
      }
    }
    fakeCudaRelease();
    made.close();  // waits for both: the memory may be freed
    EXPECT_TRUE(read.done());
    EXPECT_TRUE(written.done());
    fakeCudaReset();
  }
}

TEST_F(GpuTest, ManyThreadsAtOnce) {
  const Engine made = engine({.lanes = 2, .queue_depth = 8});
  const auto bytes = random_bytes(4 * kMiB, 14);
  const File source = file(made, bytes);
  fakeCudaDelay(100);
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < 6; ++index) {
    threads.emplace_back([&, index] {
      const GpuMemory memory(kMiB / 2);
      const GpuStream stream;
      const File own =
          *File::open(made, directory_.file("own-" + std::to_string(index)), {.mode = Mode::write});
      for (std::uint64_t round = 0; round < 8; ++round) {
        const std::uint64_t offset = (index * 37 + round * 4099) % (3 * kMiB);
        ASSERT_TRUE(source.pread(memory.view(stream.handle()), offset));
        ASSERT_TRUE(own.pwrite(memory.view(stream.handle()), offset));
        const auto got = memory.contents();
        ASSERT_TRUE(std::equal(got.begin(), got.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(GpuTest, StripedFiles) {
  const Engine made = engine({.block_bytes = 64 * kKiB});
  for (const char* name : {"a", "b", "c"}) std::filesystem::create_directory(directory_.file(name));
  const auto volume = Volume::create({directory_.file("a"), directory_.file("b"), directory_.file("c")},
                                     {.stripe_bytes = 8192});
  ASSERT_TRUE(volume);
  const auto striped = volume->open(made, "file", {.mode = Mode::write});
  ASSERT_TRUE(striped);
  const auto bytes = random_bytes(700'001, 19);
  const GpuMemory source(bytes.size());
  const GpuMemory target(bytes.size(), 1);
  source.set(bytes);
  ASSERT_TRUE(striped->pwrite(source.view(), 3));
  ASSERT_TRUE(striped->pread(target.view(), 3));
  EXPECT_EQ(target.contents(), bytes);
}

// The child touches neither the driver nor its parent's driver objects.
TEST_F(GpuTest, AForkedChildGetsAnErrorAndChangesNothing) {
  if (test::kUnderThreadSanitizer)
    GTEST_SKIP() << "the thread sanitizer supports no threads in a forked child";
  const GpuMemory memory(kMiB);
  const MemoryView view = memory.view();
  auto made = std::make_optional(engine());
  auto source = std::make_optional(file(*made, random_bytes(kMiB, 22)));
  ASSERT_TRUE(source->pread(view, 0));
  auto registered = register_host_memory({reinterpret_cast<std::byte*>(this), sizeof(*this)});
  ASSERT_TRUE(registered);
  std::vector<std::byte> host(4096);
  auto pinned = test::gpu().pin(host);
  ASSERT_TRUE(pinned);
  fakeCudaHoldCopies();
  Future pending = source->async_pread(view, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    fakeCudaFail("cuCtxPushCurrent_v2", 1, 0, 1);  // any driver call would consume it
    pending = Future();
    registered->reset();
    pinned->reset();
    source.reset();
    made.reset();
    const auto says_spawn = [](const auto& result) {
      return !result && result.error().kind == ErrorKind::unsupported &&
             result.error().message.find("spawn") != std::string::npos;
    };
    const Engine own = *Engine::create({.lanes = 1});
    const File again = *File::open(own, directory_.file("file"), {});
    const bool right = says_spawn(again.pread(view, 0)) && says_spawn(cuda_device(0)) &&
                       says_spawn(cuda_info()) && says_spawn(cuda_device_of(view.data)) &&
                       says_spawn(register_host_memory({reinterpret_cast<std::byte*>(this), 1})) &&
                       !cuda_device_in_use() && fakeCudaPending("cuCtxPushCurrent_v2");
    ::_exit(right ? 0 : 1);
  }
  fakeCudaRelease();
  EXPECT_TRUE(pending.result());
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(GpuTest, ANullPointerAndAnUnknownDeviceAreRejected) {
  const Engine made = engine();
  const File target = file(made, random_bytes(100, 15));
  const auto read = target.pread({nullptr, 10, &test::gpu()}, 0);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::invalid_argument);
  EXPECT_FALSE(cuda_device(2));
  const auto missing = cuda_device(7);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().kind, ErrorKind::unsupported);
  EXPECT_EQ(name_of(test::gpu()), "cuda:0");
}

}  // namespace
}  // namespace trunkline
