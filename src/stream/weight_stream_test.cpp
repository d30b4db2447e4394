#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "stream/stream_fixture.h"
#include "support/engines.h"
#include "support/sanitizers.h"

namespace trunkline {
namespace {

using test::StoredUnits;

class WeightStreamTest : public test::StreamTest {};

// Acquires a unit, checks its bytes and releases it.
testing::AssertionResult uses(WeightStream& stream, std::size_t unit, const auto& holds) {
  auto memory = stream.acquire(unit);
  if (!memory) return testing::AssertionFailure() << memory.error().message;
  if (!holds(unit, *memory)) return testing::AssertionFailure() << "unit " << unit << " has other bytes";
  if (auto released = stream.release(unit); !released)
    return testing::AssertionFailure() << released.error().message;
  return testing::AssertionSuccess();
}

TEST_F(WeightStreamTest, EveryCycleReturnsTheStoredBytes) {
  const Engine engine = make_engine();
  for (int round = 0; round < test::scaled(30); ++round) {
    const StoredUnits stored = round % 2 == 0 ? store_scattered(engine, 1 + random_() % 20)
                                              : store_plain(engine, std::vector<std::uint64_t>(12, 700'000));
    std::uint64_t largest = 0;
    std::uint64_t total = 0;
    for (const StreamUnit& unit : stored.units) {
      largest = std::max(largest, (unit.bytes + 4095) / 4096 * 4096);
      total += unit.bytes;
    }
    auto stream = open(engine, stored,
                       {.memory_bytes = 2 * largest + random_() % (total + 1),
                        .slots = 2 + random_() % 3,
                        .verify = static_cast<StreamVerify>(random_() % 3)});
    ASSERT_TRUE(stream) << stream.error().message;
    const auto same = [&](std::size_t unit, const MemoryView& memory) { return holds(stored, unit, memory); };
    for (int cycle = 0; cycle < 4; ++cycle) {
      for (std::size_t unit = 0; unit < stored.units.size(); ++unit) ASSERT_TRUE(uses(*stream, unit, same));
    }
    const StreamStats stats = stream->stats();
    EXPECT_EQ(stats.acquired, 4 * stored.units.size());
    EXPECT_EQ(stats.unused, 0U);
    EXPECT_EQ(stats.failed, 0U);
  }
}

TEST_F(WeightStreamTest, EveryOrderReturnsTheStoredBytes) {
  const Engine engine = make_engine();
  const StoredUnits stored = store_scattered(engine, 16);
  for (const std::size_t slots : {2U, 3U, 5U}) {
    auto stream = open(engine, stored, {.memory_bytes = 2'500'000, .slots = slots});
    ASSERT_TRUE(stream) << stream.error().message;
    std::vector<std::size_t> held;
    for (int step = 0; step < 3000; ++step) {
      const std::size_t unit = random_() % stored.units.size();
      auto memory = stream->acquire(unit);
      if (memory) {
        ASSERT_TRUE(std::ranges::any_of(stream->memory(), [&](const MemoryView& whole) {
          return memory->data >= whole.data && memory->data + memory->bytes <= whole.data + whole.bytes;
        }));
      }
      if (!memory) {
        ASSERT_EQ(memory.error().kind, ErrorKind::invalid_argument);
        ASSERT_GE(held.size(), slots);
      } else {
        ASSERT_TRUE(holds(stored, unit, *memory));
        held.push_back(unit);
      }
      while (!held.empty() && (held.size() > 4 || random_() % 2 == 0)) {
        const std::size_t which = random_() % held.size();
        ASSERT_TRUE(stream->release(held[which]));
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
  }
}

TEST_F(WeightStreamTest, ReadsAheadAcrossTheEndOfTheCycle) {
  const Engine engine = make_engine();
  const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(6, 64 * 1024));
  auto stream = open(engine, stored, {.memory_bytes = 2 * 64 * 1024});
  ASSERT_TRUE(stream) << stream.error().message;
  for (std::size_t unit = 0; unit < 6; ++unit) {
    ASSERT_TRUE(stream->acquire(unit));
    if (unit < 5) {
      ASSERT_TRUE(stream->release(unit));
    }
  }
  // The last unit is in use, but the first one of the next cycle is read all the same.
  for (int tries = 0; tries < 5000 && stream->stats().units_read < 7; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(stream->stats().units_read, 7U);
  const std::uint64_t waited = stream->stats().waited;
  ASSERT_TRUE(stream->acquire(0));
  EXPECT_EQ(stream->stats().waited, waited);
}

TEST_F(WeightStreamTest, ResidentUnitsAreReadOnce) {
  const Engine engine = make_engine();
  const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(10, 64 * 1024));
  auto stream = open(engine, stored, {.memory_bytes = 7 * 64 * 1024});
  ASSERT_TRUE(stream) << stream.error().message;
  EXPECT_EQ(std::ranges::count(stream->placement().resident, true), 5);
  const auto same = [&](std::size_t unit, const MemoryView& memory) { return holds(stored, unit, memory); };
  for (int cycle = 0; cycle < 5; ++cycle) {
    for (std::size_t unit = 0; unit < 10; ++unit) ASSERT_TRUE(uses(*stream, unit, same));
  }
  const std::uint64_t read = stream->stats().units_read;
  EXPECT_GE(read, 5U + 5 * 5);
  EXPECT_LE(read, 5U + 5 * 5 + 2);  // two may be read ahead
}

TEST_F(WeightStreamTest, AGivenOrderIsReadAhead) {
  const Engine engine = make_engine();
  const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(8, 64 * 1024));
  auto stream = open(engine, stored, {.memory_bytes = 2 * 64 * 1024});
  ASSERT_TRUE(stream) << stream.error().message;
  const std::vector<std::size_t> order = {3, 1, 7, 0, 5, 2, 6, 4};
  const auto same = [&](std::size_t unit, const MemoryView& memory) { return holds(stored, unit, memory); };
  for (const std::size_t unit : order) ASSERT_TRUE(uses(*stream, unit, same));
  ASSERT_TRUE(stream->set_order(order));
  for (const std::size_t unit : order) ASSERT_TRUE(uses(*stream, unit, same));
  const std::uint64_t unused = stream->stats().unused;
  for (int cycle = 0; cycle < 5; ++cycle) {
    for (const std::size_t unit : order) ASSERT_TRUE(uses(*stream, unit, same));
  }
  EXPECT_EQ(stream->stats().unused, unused);

  for (const std::vector<std::size_t>& bad : {std::vector<std::size_t>{},
                                              {0, 1, 2, 3, 4, 5, 6},
                                              {0, 1, 2, 3, 4, 5, 6, 6},
                                              {0, 1, 2, 3, 4, 5, 6, 8}}) {
    const Status refused = stream->set_order(bad);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument);
  }
}

TEST_F(WeightStreamTest, MoreUnitsThanSlotsCannotBeHeld) {
  const Engine engine = make_engine();
  const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(5, 8192));
  auto stream = open(engine, stored, {.memory_bytes = 2 * 8192});
  ASSERT_TRUE(stream) << stream.error().message;
  ASSERT_TRUE(stream->acquire(4));
  ASSERT_TRUE(stream->acquire(2));
  ASSERT_TRUE(stream->acquire(2));
  const auto refused = stream->acquire(1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument);
  EXPECT_NE(refused.error().message.find("unit 1"), std::string::npos);
  ASSERT_TRUE(stream->release(2));
  EXPECT_FALSE(stream->acquire(1)) << "the second holder has not released it yet";
  ASSERT_TRUE(stream->release(2));
  ASSERT_TRUE(stream->acquire(1));
  EXPECT_FALSE(stream->release(2));
  EXPECT_FALSE(stream->release(99));
  EXPECT_FALSE(stream->acquire(99));
}

TEST_F(WeightStreamTest, ThreadsShareAStream) {
  const Engine engine = make_engine();
  const StoredUnits stored = store_scattered(engine, 12);
  auto stream = open(engine, stored, {.memory_bytes = 3'500'000, .slots = 4});
  ASSERT_TRUE(stream) << stream.error().message;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int step = 0; step < 500; ++step) {
        const std::size_t unit = random() % stored.units.size();
        auto memory = stream->acquire(unit);
        if (!memory || !holds(stored, unit, *memory)) ++wrong;
        if (memory && !stream->release(unit)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(WeightStreamTest, InvalidArgumentsAreRejected) {
  const Engine engine = make_engine();
  const StoredUnits stored = store_plain(engine, {8192, 8192, 8192});
  const auto refused = [&](auto&& spoil) {
    StoredUnits spoilt = stored;
    spoil(spoilt.units);
    const auto stream = open(engine, spoilt, {});
    return !stream && stream.error().kind == ErrorKind::invalid_argument;
  };
  EXPECT_TRUE(refused([](auto& units) { units.clear(); }));
  EXPECT_TRUE(refused([](auto& units) { units[1].bytes = 0; }));
  EXPECT_TRUE(refused([](auto& units) { units[1].parts[0].file = 1; }));
  EXPECT_TRUE(refused([](auto& units) { units[1].parts[0].at = 1; }));
  EXPECT_TRUE(refused([](auto& units) { units[1].parts[0].offset = ~std::uint64_t{0}; }));
  EXPECT_TRUE(refused([](auto& units) { units[1].parts.push_back(units[1].parts[0]); }));
  const auto small = open(engine, stored, {.memory_bytes = 8192});
  ASSERT_FALSE(small);
  EXPECT_EQ(small.error().kind, ErrorKind::out_of_budget);
}

TEST_F(WeightStreamTest, TheEnginesBudgetLimitsTheSlots) {
  const Engine engine = make_engine({.lanes = 1, .pinned_budget_bytes = 4 * kMiB});
  const StoredUnits stored = store_plain(engine, std::vector<std::uint64_t>(4, 3 * kMiB));
  const auto refused = open(engine, stored, {.memory_bytes = 6 * kMiB});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::out_of_budget);
}

class WeightStreamBackendTest : public test::OnEveryBackend {};

TEST_P(WeightStreamBackendTest, StreamsOnEveryBackend) {
  const Engine engine = make_engine({.lanes = 2, .queue_depth = 4, .block_bytes = 64 * kKiB});
  const test::TempDirectory root;
  std::mt19937_64 random(1);
  auto bytes = test::random_bytes(random, 2 * kMiB);
  {
    auto file = File::open(engine, root.file("pack"), {.mode = Mode::write});
    ASSERT_TRUE(file);
    ASSERT_TRUE(file->pwrite({bytes.data(), bytes.size()}, 0));
  }
  std::vector<StreamUnit> units;
  for (std::uint64_t at = 0; at < bytes.size(); at += 256 * kKiB) {
    const std::span<const std::byte> content(bytes.data() + at, 256 * kKiB);
    units.push_back({.name = "unit",
                     .bytes = content.size(),
                     .parts = {{.offset = at, .bytes = content.size(), .checksum = crc32c(content)}}});
  }
  auto file = File::open(engine, root.file("pack"));
  ASSERT_TRUE(file);
  auto stream =
      WeightStream::open(engine, {*file}, units, {.memory_bytes = kMiB, .verify = StreamVerify::always});
  ASSERT_TRUE(stream) << stream.error().message;
  for (int cycle = 0; cycle < 3; ++cycle) {
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      const auto memory = stream->acquire(unit);
      ASSERT_TRUE(memory) << memory.error().message;
      ASSERT_EQ(std::memcmp(memory->data, bytes.data() + unit * 256 * kKiB, 256 * kKiB), 0);
      ASSERT_TRUE(stream->release(unit));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, WeightStreamBackendTest, testing::ValuesIn(test::all_backends()),
                         test::backend_name);

}  // namespace
}  // namespace trunkline
