// Streams that hand out units in GPU memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "stream/stream_fixture.h"
#include "support/gpu.h"
#include "support/sanitizers.h"
#include "trunkline/fault.h"

namespace trunkline {
namespace {

using namespace std::chrono_literals;
using test::expect_left;
using test::GpuMemory;
using test::GpuStream;
using test::StoredUnits;

constexpr int kOutOfMemory = 2;
constexpr int kRounds = test::kUnderThreadSanitizer ? 5 : 20;

class StreamGpuTest : public test::StreamTest {
 protected:
  static StreamOptions with(const GpuMemory& memory, std::uint64_t bytes, std::uint64_t host_bytes) {
    return {.memory_bytes = host_bytes, .device_memory = memory.view(0, bytes)};
  }

  static std::uint64_t total_of(const StoredUnits& stored) {
    std::uint64_t total = 0;
    for (const StreamUnit& unit : stored.units) total += (unit.bytes + 4095) / 4096 * 4096;
    return total;
  }

  static std::vector<std::byte> peek(const std::byte* data, std::uint64_t bytes) {
    std::vector<std::byte> copy(bytes);
    fakeCudaPeek(copy.data(), reinterpret_cast<std::uint64_t>(data), bytes);
    return copy;
  }

  // Whether each part is where the layout says.
  static bool holds(const StoredUnits& stored, std::size_t unit, const MemoryView& memory) {
    const std::vector<std::uint64_t> layout = device_layout(stored.units[unit]);
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const StreamPart& part = stored.units[unit].parts[i];
      if (part.bytes == 0) continue;
      const auto begin = stored.contents[unit].begin() + static_cast<std::ptrdiff_t>(part.at);
      if (peek(memory.data + layout[i], part.bytes) !=
          std::vector<std::byte>(begin, begin + static_cast<std::ptrdiff_t>(part.bytes)))
        return false;
    }
    return true;
  }

  test::GpuWatch watch_;
};

TEST_F(StreamGpuTest, CyclesInOrder) {
  fakeCudaDelayUpTo(300);
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(round);
    const Engine engine = make_engine({.lanes = 1});
    const StoredUnits stored = store_scattered(engine, 1 + random_() % 12);
    const std::uint64_t slot = device_slot_bytes(stored.units);
    const std::uint64_t bytes = (2 + random_() % 3) * slot + random_() % slot;
    const GpuMemory memory(bytes);
    const GpuStream compute;
    const std::uint64_t total = total_of(stored);
    auto stream = open(engine, stored, with(memory, bytes, total / 2 + random_() % total + 2 * 500'000));
    ASSERT_TRUE(stream) << stream.error().message;
    for (int pass = 0; pass < 4; ++pass) {
      for (std::size_t unit = 0; unit < stored.units.size(); ++unit) {
        const auto acquired = stream->acquire(unit);
        ASSERT_TRUE(acquired) << acquired.error().message;
        EXPECT_GE(acquired->data, memory.view().data);
        ASSERT_TRUE(holds(stored, unit, *acquired)) << unit;
        // A kernel that uses the unit: it must not find the next unit's bytes.
        ASSERT_EQ(fakeCudaFill(reinterpret_cast<std::uint64_t>(acquired->data), acquired->bytes, 1,
                               compute.handle()),
                  0);
        ASSERT_TRUE(stream->release(unit, compute.handle()));
      }
    }
    EXPECT_EQ(compute.synchronize(), 0);
    EXPECT_GT(stream->stats().bytes_copied, 0U);
    EXPECT_EQ(fakeCudaPageableCopies(), 0U);
  }
}

TEST_F(StreamGpuTest, AnyOrderGivesTheRightBytes) {
  fakeCudaDelayUpTo(200);
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(round);
    const Engine engine = make_engine({.lanes = 1});
    const StoredUnits stored = store_scattered(engine, 2 + random_() % 12);
    const std::size_t slots = 2 + random_() % 3;
    const std::uint64_t bytes = slots * device_slot_bytes(stored.units);
    const GpuMemory memory(bytes);
    auto stream = open(engine, stored, with(memory, bytes, total_of(stored) / 2 + 2 * 500'000));
    ASSERT_TRUE(stream) << stream.error().message;
    std::vector<std::size_t> held;
    for (int step = 0; step < 60; ++step) {
      if (random_() % 20 == 0) {
        std::vector<std::size_t> order(stored.units.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::ranges::shuffle(order, random_);
        ASSERT_TRUE(stream->set_order(order));
      }
      if (!held.empty() && (held.size() == slots || random_() % 2 == 0)) {
        const auto at = static_cast<std::ptrdiff_t>(random_() % held.size());
        ASSERT_TRUE(stream->release(held[static_cast<std::size_t>(at)]));
        held.erase(held.begin() + at);
        continue;
      }
      const std::size_t unit = random_() % stored.units.size();
      const auto acquired = stream->acquire(unit);
      if (std::ranges::find(held, unit) != held.end()) {
        ASSERT_FALSE(acquired);
        EXPECT_EQ(acquired.error().kind, ErrorKind::invalid_argument);
        continue;
      }
      ASSERT_TRUE(acquired) << acquired.error().message;
      ASSERT_TRUE(holds(stored, unit, *acquired)) << unit;
      held.push_back(unit);
    }
  }
}

TEST_F(StreamGpuTest, ASlotIsNotOverwrittenBeforeTheStreamIsDoneWithIt) {
  const Engine engine = make_engine({.lanes = 1});
  const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(6, 300'000));
  const std::uint64_t bytes = 2 * device_slot_bytes(stored.units);
  const GpuMemory memory(bytes);
  const GpuStream compute;
  auto stream = open(engine, stored, with(memory, bytes, 2'000'000));
  ASSERT_TRUE(stream) << stream.error().message;
  const auto first = stream->acquire(0);
  ASSERT_TRUE(first);
  fakeCudaHold(compute.handle());
  ASSERT_TRUE(stream->release(0, compute.handle()));
  ASSERT_TRUE(stream->acquire(1));
  ASSERT_TRUE(stream->release(1));
  std::this_thread::sleep_for(50ms);  // what is copied next has plenty of time
  EXPECT_TRUE(holds(stored, 0, *first));
  fakeCudaRelease();
  for (const std::size_t unit : {2U, 3U, 4U, 5U, 0U}) {
    const auto acquired = stream->acquire(unit);
    ASSERT_TRUE(acquired);
    EXPECT_TRUE(holds(stored, unit, *acquired));
    ASSERT_TRUE(stream->release(unit, compute.handle()));
  }
}

TEST_F(StreamGpuTest, EveryFailureOfTheDriverIsReportedAndLeavesAWorkingStream) {
  const char* functions[] = {"cuCtxPushCurrent_v2", "cuStreamCreate",       "cuEventCreate",
                             "cuEventRecord",       "cuStreamWaitEvent",    "cuMemcpyHtoDAsync_v2",
                             "cuEventSynchronize",  "cuMemHostRegister_v2", "cuStreamIsCapturing"};
  const Engine engine = make_engine({.lanes = 1});
  const StoredUnits stored = store_scattered(engine, 6);
  const std::uint64_t bytes = 3 * device_slot_bytes(stored.units);
  const GpuMemory memory(bytes);
  const std::uint64_t streams = fakeCudaLive("streams");
  const std::uint64_t events = fakeCudaLive("events");
  const std::uint64_t registrations = fakeCudaLive("registrations");
  for (const char* function : functions) {
    unsigned failures = 0;
    for (unsigned after = 0; after < 60; after += test::kPositionStep + after / 4) {
      SCOPED_TRACE(std::string(function) + " after " + std::to_string(after));
      fakeCudaFail(function, kOutOfMemory, after, 1);
      auto stream = open(engine, stored, with(memory, bytes, 1'500'000));
      if (!stream) {
        ++failures;
        EXPECT_EQ(stream.error().kind, ErrorKind::device);
        fakeCudaReset();
        continue;
      }
      for (int pass = 0; pass < 2; ++pass) {
        for (std::size_t unit = 0; unit < stored.units.size(); ++unit) {
          auto acquired = stream->acquire(unit);
          if (!acquired) {
            ++failures;
            EXPECT_EQ(acquired.error().kind, ErrorKind::device) << acquired.error().message;
            acquired = stream->acquire(unit);  // reads and copies it again
          }
          ASSERT_TRUE(acquired) << acquired.error().message;
          ASSERT_TRUE(holds(stored, unit, *acquired));
          if (!stream->release(unit)) {
            ++failures;
            ASSERT_TRUE(stream->release(unit));  // it is still held
          }
        }
      }
      fakeCudaReset();
    }
    if (std::string_view(function) != "cuMemHostRegister_v2") {
      EXPECT_GE(failures, 1U) << function;
    }
  }
  expect_left("streams", streams);
  expect_left("events", events);
  expect_left("registrations", registrations);
}

TEST_F(StreamGpuTest, AFailedReadIsReportedOnceAndReadAgain) {
  for (std::uint64_t at = 0; at < 12; ++at) {
    const auto faults = Faults::create();
    const Engine engine = make_engine({.lanes = 1, .faults = faults});
    const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(5, 200'000));
    const std::uint64_t bytes = 2 * device_slot_bytes(stored.units);
    const GpuMemory memory(bytes);
    faults->fail(Op::read, at, EIO);
    auto stream = open(engine, stored, with(memory, bytes, 700'000));
    ASSERT_TRUE(stream) << stream.error().message;
    int failed = 0;
    for (int pass = 0; pass < 4; ++pass) {
      for (std::size_t unit = 0; unit < 5; ++unit) {
        auto acquired = stream->acquire(unit);
        if (!acquired) {
          ++failed;
          EXPECT_EQ(acquired.error().code, EIO);
          acquired = stream->acquire(unit);
        }
        ASSERT_TRUE(acquired) << acquired.error().message;
        ASSERT_TRUE(holds(stored, unit, *acquired));
        ASSERT_TRUE(stream->release(unit));
      }
    }
    EXPECT_EQ(failed, faults->injected() > 0 ? 1 : 0);
  }
}

TEST_F(StreamGpuTest, MayBeDestroyedAtAnyMoment) {
  for (int round = 0; round < 3 * kRounds; ++round) {
    const Engine engine = make_engine({.lanes = 1});
    const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(5, 200'000));
    const std::uint64_t bytes = 3 * device_slot_bytes(stored.units);
    const GpuMemory memory(bytes);
    fakeCudaDelayUpTo(2000);
    auto stream = open(engine, stored, with(memory, bytes, 700'000));
    ASSERT_TRUE(stream);
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 3000));
    if (round % 3 == 0) {
      ASSERT_TRUE(stream->acquire(random_() % 5));
    }
    if (round % 5 == 0) {
      auto other = open(engine, stored, {.memory_bytes = 700'000});
      ASSERT_TRUE(other);
      *stream = std::move(*other);
      const auto acquired = stream->acquire(1);
      ASSERT_TRUE(acquired);
      EXPECT_TRUE(StreamTest::holds(stored, 1, *acquired));
    }
  }
}

TEST_F(StreamGpuTest, MemoryThatIsTooSmallIsRejectedWithTheMinimum) {
  const Engine engine = make_engine({.lanes = 1});
  const StoredUnits stored = store_plain(engine, {200'000, 300'000});
  const std::uint64_t least = 2 * device_slot_bytes(stored.units);
  const GpuMemory memory(least);
  const auto refused = open(engine, stored, with(memory, least - 1, 2'000'000));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::out_of_budget);
  EXPECT_NE(refused.error().message.find(std::to_string(least)), std::string::npos);
  auto stream = open(engine, stored, with(memory, least, 2'000'000));
  ASSERT_TRUE(stream);
  EXPECT_FALSE(stream->acquire(2));
  EXPECT_FALSE(stream->release(0));
  EXPECT_EQ(stream->acquire(0, 1min)->device, &test::gpu());
}

TEST_F(StreamGpuTest, AfterAFailedCopyTheNextOneAlsoWaitsForTheComputation) {
  const Engine engine = make_engine({.lanes = 1});
  const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(6, 300'000));
  const std::uint64_t bytes = 2 * device_slot_bytes(stored.units);
  const GpuMemory memory(bytes);
  const GpuStream compute;
  auto stream = open(engine, stored, with(memory, bytes, 2'000'000));
  ASSERT_TRUE(stream);
  const auto first = stream->acquire(0);
  ASSERT_TRUE(first);
  ASSERT_TRUE(stream->acquire(1));
  fakeCudaHold(compute.handle());
  fakeCudaFail("cuStreamWaitEvent", 2, 0, 1);
  ASSERT_TRUE(stream->release(0, compute.handle()));
  EXPECT_FALSE(stream->acquire(2, 1min));
  const auto early = stream->acquire(2, 300ms);
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().kind, ErrorKind::timed_out);
  EXPECT_TRUE(holds(stored, 0, *first));
  fakeCudaRelease();
  const auto late = stream->acquire(2, 1min);
  ASSERT_TRUE(late);
  EXPECT_TRUE(holds(stored, 2, *late));
}

}  // namespace
}  // namespace trunkline
