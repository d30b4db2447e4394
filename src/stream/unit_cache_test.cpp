#include "trunkline/unit_cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <future>
#include <limits>
#include <numeric>
#include <thread>

#include "stream/stream_fixture.h"
#include "support/sanitizers.h"

namespace trunkline {
namespace {

using namespace std::chrono_literals;
using test::StoredUnits;
using Units = std::vector<std::size_t>;

constexpr std::uint64_t kUnitBytes = 300'000;
constexpr std::uint64_t kSlotBytes = 303'104;

class UnitCacheTest : public test::StreamTest {
 protected:
  void SetUp() override { stored_ = store_plain(make_engine(), std::vector<std::uint64_t>(16, kUnitBytes)); }

  // Layers of four units.
  UnitCache open_cache(const Engine& engine, std::size_t slots, const UnitCacheOptions& options = {}) {
    std::vector<File> files;
    for (const std::string& path : stored_.paths) files.push_back(*File::open(engine, path));
    std::vector<CacheUnit> units;
    for (const StreamUnit& unit : stored_.units)
      units.push_back({.unit = unit, .group = units.size() / 4, .pool = 0});
    UnitCacheOptions wanted = options;
    wanted.memory_bytes = slots * kSlotBytes;
    auto cache = UnitCache::open(engine, std::move(files), std::move(units), wanted);
    EXPECT_TRUE(cache) << cache.error().message;
    return std::move(*cache);
  }

  Engine faulty_engine() {
    faults_ = Faults::create();
    return make_engine({.lanes = 1, .queue_depth = 64, .block_bytes = 64 * kKiB, .faults = faults_});
  }

  static Status request(UnitCache& cache, const Units& units) {
    std::vector<UnitUse> uses;
    for (const std::size_t unit : units) uses.push_back({.unit = unit});
    return cache.request(units.front() / 4, uses);
  }

  // Acquires a unit, checks its bytes and releases it.
  Status use(UnitCache& cache, std::size_t unit) {
    auto acquired = cache.acquire({&unit, 1});
    if (!acquired) return std::unexpected(acquired.error());
    EXPECT_EQ(acquired->unit, unit);
    EXPECT_TRUE(holds(stored_, unit, acquired->memory)) << unit;
    return cache.release(unit);
  }

  // A step of all layers, each of which uses two units. Returns the errors.
  std::vector<Error> step(UnitCache& cache, std::mt19937_64& random) {
    std::vector<Error> errors;
    for (std::size_t layer = 0; layer < 4; ++layer) {
      const std::size_t first = random() % 4;
      const Units units{layer * 4 + first, layer * 4 + (first + 1 + random() % 3) % 4};
      EXPECT_TRUE(request(cache, units));
      for (const std::size_t unit : units) {
        if (auto used = use(cache, unit); !used) errors.push_back(used.error());
      }
    }
    return errors;
  }

  void flip(std::size_t unit, std::size_t at, unsigned char mask = 1) {
    std::fstream file(stored_.paths[0], std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(stored_.units[unit].parts[0].offset + at));
    file.put(static_cast<char>(stored_.contents[unit][at] ^ std::byte{mask}));
  }

  StoredUnits stored_;
  std::shared_ptr<Faults> faults_;
};

TEST_F(UnitCacheTest, EveryStepGetsTheStoredBytes) {
  for (const std::size_t slots : {2U, 3U, 7U, 16U}) {
    for (const StreamVerify verify : {StreamVerify::never, StreamVerify::once, StreamVerify::always}) {
      const Engine engine = make_engine();
      UnitCache cache = open_cache(engine, slots, {.verify = verify, .read_ahead = 1 + random_() % 4});
      for (int token = 0; token < test::scaled(20); ++token) ASSERT_TRUE(step(cache, random_).empty());
      const UnitCacheStats stats = cache.stats();
      EXPECT_EQ(stats.hits + stats.misses, stats.acquired);
      EXPECT_EQ(stats.units_read, stats.misses);
      EXPECT_EQ(stats.bytes_read, stats.misses * kUnitBytes);
      EXPECT_EQ(stats.evictions, stats.misses - std::min<std::uint64_t>(slots, stats.misses));
      EXPECT_EQ(stats.failed, 0U);
    }
  }
}

TEST_F(UnitCacheTest, StatisticsOfGroupsAddUpToThoseOfTheCache) {
  const Engine engine = make_engine();
  UnitCache cache = open_cache(engine, 5);
  for (int token = 0; token < test::scaled(20); ++token) ASSERT_TRUE(step(cache, random_).empty());
  ASSERT_TRUE(request(cache, {4, 5, 6, 7}));
  for (const std::size_t unit : {4U, 5U, 6U, 7U}) ASSERT_TRUE(use(cache, unit));
  const UnitCacheStats stats = cache.stats();
  const std::vector<UnitGroupStats> groups = cache.group_stats();
  ASSERT_EQ(groups.size(), 4U);
  UnitGroupStats sum;
  for (const UnitGroupStats& each : groups) {
    sum.requests += each.requests;
    sum.hits += each.hits;
    sum.misses += each.misses;
    sum.units_read += each.units_read;
    sum.bytes_read += each.bytes_read;
    sum.evictions += each.evictions;
  }
  EXPECT_EQ(sum.requests, stats.requests);
  EXPECT_EQ(sum.hits, stats.hits);
  EXPECT_EQ(sum.misses, stats.misses);
  EXPECT_EQ(sum.units_read, stats.units_read);
  EXPECT_EQ(sum.bytes_read, stats.bytes_read);
  EXPECT_EQ(sum.evictions, stats.evictions);
  EXPECT_EQ(groups[1].requests, groups[0].requests + 1);
  EXPECT_EQ(groups[1].hits + groups[1].misses, groups[0].hits + groups[0].misses + 4);
}

TEST_F(UnitCacheTest, AGroupThatDoesNotExistIsRejected) {
  const Engine engine = make_engine();
  UnitCache cache = open_cache(engine, 4);
  EXPECT_EQ(cache.request(4, {}).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(cache.stats().requests, 0U);
}

TEST_F(UnitCacheTest, UnitsInSeveralPartsAndFilesArriveWhole) {
  for (int round = 0; round < test::scaled(12); ++round) {
    const Engine engine = make_engine();
    stored_ = store_scattered(engine, 12);
    std::vector<File> files;
    for (const std::string& path : stored_.paths) files.push_back(*File::open(engine, path));
    std::vector<CacheUnit> units;
    for (const StreamUnit& unit : stored_.units)
      units.push_back({.unit = unit, .group = 0, .pool = units.size() % 2});
    auto cache = UnitCache::open(engine, std::move(files), std::move(units),
                                 {.memory_bytes = 2'000'000, .read_ahead = 2});
    ASSERT_TRUE(cache) << cache.error().message;
    for (int token = 0; token < 10; ++token) {
      Units used(stored_.units.size());
      std::iota(used.begin(), used.end(), 0U);
      std::ranges::shuffle(used, random_);
      used.resize(1 + random_() % used.size());
      std::vector<UnitUse> uses;
      for (const std::size_t unit : used) uses.push_back({.unit = unit});
      ASSERT_TRUE(cache->request(0, uses));
      for (const std::size_t unit : used) ASSERT_TRUE(use(*cache, unit));
    }
  }
}

TEST_F(UnitCacheTest, WhatIsInMemoryIsHandedOutFirst) {
  const Engine engine = faulty_engine();
  UnitCache cache = open_cache(engine, 4);
  ASSERT_TRUE(use(cache, 2));
  ASSERT_TRUE(use(cache, 3));
  faults_->hold(Op::read, faults_->commands(Op::read), 100);
  Units units{0, 1, 2, 3};
  ASSERT_TRUE(request(cache, units));
  for (const std::size_t expected : {2U, 3U}) {
    const auto acquired = cache.acquire(units, 0ns);
    ASSERT_TRUE(acquired) << acquired.error().message;
    EXPECT_EQ(acquired->unit, expected);
    EXPECT_TRUE(cache.release(expected));
    std::erase(units, expected);
  }
  const auto late = cache.acquire(units, 1ms);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().kind, ErrorKind::timed_out);
  faults_->release();
  while (!units.empty()) {
    const auto acquired = cache.acquire(units);
    ASSERT_TRUE(acquired);
    EXPECT_TRUE(holds(stored_, acquired->unit, acquired->memory));
    EXPECT_TRUE(cache.release(acquired->unit));
    std::erase(units, acquired->unit);
  }
  EXPECT_EQ(cache.stats().hits, 2U);
}

TEST_F(UnitCacheTest, AllMissesOfAStepAreReadAtOnce) {
  const Engine engine = faulty_engine();
  UnitCache cache = open_cache(engine, 4);
  faults_->hold(Op::read, 0, 100);
  ASSERT_TRUE(request(cache, {0, 1, 2, 3}));
  // 300,000 bytes are five commands.
  while (faults_->commands(Op::read) < 20) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(cache.stats().units_read, 0U);
  faults_->release();
  for (const std::size_t unit : {0U, 1U, 2U, 3U}) EXPECT_TRUE(use(cache, unit));
  EXPECT_EQ(cache.stats().misses, 4U);
}

TEST_F(UnitCacheTest, ReadsInFlightAreShared) {
  const Engine engine = faulty_engine();
  UnitCache cache = open_cache(engine, 4);
  faults_->hold(Op::read, 0, 5);
  std::vector<std::future<Status>> threads;
  for (int thread = 0; thread < 4; ++thread)
    threads.push_back(std::async(std::launch::async, [&] { return use(cache, 7); }));
  while (cache.stats().waited < 4) std::this_thread::sleep_for(1ms);
  faults_->release();
  for (auto& thread : threads) EXPECT_TRUE(thread.get());
  EXPECT_EQ(cache.stats().units_read, 1U);
}

TEST_F(UnitCacheTest, AcquiredUnitsStayWhereTheyAre) {
  const Engine engine = make_engine();
  UnitCache cache = open_cache(engine, 2);
  const Units held{0, 1};
  std::vector<MemoryView> memory;
  for (std::size_t unit : held) memory.push_back(cache.acquire({&unit, 1})->memory);
  const std::size_t other = 9;
  const auto refused = cache.acquire({&other, 1});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument);
  EXPECT_TRUE(cache.release(1));
  EXPECT_TRUE(use(cache, 9));
  EXPECT_TRUE(use(cache, 10));
  EXPECT_TRUE(holds(stored_, 0, memory[0]));
  EXPECT_FALSE(cache.release(1));
  EXPECT_TRUE(cache.release(0));
}

TEST_F(UnitCacheTest, InvalidArgumentsAreRejected) {
  const Engine engine = make_engine();
  UnitCache cache = open_cache(engine, 2);
  const std::size_t unknown = 16;
  EXPECT_FALSE(cache.acquire({&unknown, 1}));
  EXPECT_FALSE(cache.acquire({}));
  EXPECT_FALSE(cache.release(16));
  EXPECT_FALSE(cache.request(0, std::vector<UnitUse>{{.unit = 16}}));
  const auto other_group = cache.request(0, std::vector<UnitUse>{{.unit = 4}});
  ASSERT_FALSE(other_group);
  EXPECT_EQ(other_group.error().message, "uses: unit 4 is not in group 0");
  EXPECT_FALSE(cache.request(0, {}, 1, std::vector<std::size_t>{16}));
  auto small = UnitCache::open(engine, {*File::open(engine, stored_.paths[0])},
                               {{.unit = stored_.units[0]}, {.unit = stored_.units[1]}}, {.memory_bytes = 1});
  ASSERT_FALSE(small);
  EXPECT_EQ(small.error().kind, ErrorKind::out_of_budget);
  EXPECT_FALSE(UnitCache::open(engine, {}, {{.unit = stored_.units[0]}}));
}

TEST_F(UnitCacheTest, UseRatesAreHandedToTheNextCache) {
  const Engine engine = faulty_engine();
  UnitCache cache = open_cache(engine, 4);
  ASSERT_TRUE(request(cache, {1, 2}));
  const std::vector<double> rates = cache.use_rates();
  ASSERT_EQ(rates.size(), stored_.units.size());
  EXPECT_GT(rates[1], 0);
  EXPECT_EQ(rates[0], 0);
  EXPECT_EQ(open_cache(engine, 4, {.use_rates = rates}).use_rates(), rates);
}

TEST_F(UnitCacheTest, UseRatesMustFitTheUnits) {
  const Engine engine = faulty_engine();
  std::vector<std::vector<double>> invalid{{0.5}};
  for (const double rate : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()})
    invalid.emplace_back(stored_.units.size(), rate);
  for (const std::vector<double>& rates : invalid) {
    std::vector<File> files;
    for (const std::string& path : stored_.paths) files.push_back(*File::open(engine, path));
    std::vector<CacheUnit> units;
    for (const StreamUnit& unit : stored_.units) units.push_back({.unit = unit});
    const auto cache = UnitCache::open(engine, std::move(files), std::move(units), {.use_rates = rates});
    ASSERT_FALSE(cache);
    EXPECT_EQ(cache.error().kind, ErrorKind::invalid_argument);
  }
}

TEST_F(UnitCacheTest, SeveralThreadsGetTheStoredBytes) {
  const Engine engine = make_engine();
  UnitCache cache = open_cache(engine, 6, {.read_ahead = 3});
  std::vector<std::future<void>> threads;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    threads.push_back(std::async(std::launch::async, [&, seed] {
      std::mt19937_64 random(seed);
      for (int token = 0; token < test::scaled(20); ++token) EXPECT_TRUE(step(cache, random).empty());
    }));
  }
  for (auto& thread : threads) thread.get();
}

TEST_F(UnitCacheTest, EveryFailedReadIsReportedOnceAndReadAgain) {
  for (const std::size_t slots : {2U, 9U}) {
    for (std::uint64_t at = 0;; at += test::kPositionStep) {
      const Engine engine = faulty_engine();
      faults_->fail(Op::read, at, EIO);
      UnitCache cache = open_cache(engine, slots);
      std::mt19937_64 random(7);
      std::vector<Error> errors = step(cache, random);
      if (faults_->injected() == 0) {
        EXPECT_GE(at, 5U * 8U);
        break;
      }
      ASSERT_EQ(errors.size(), 1U);
      EXPECT_EQ(errors[0].code, EIO);
      EXPECT_EQ(errors[0].path, stored_.paths[0]);
      EXPECT_EQ(cache.stats().failed, 1U);
      for (int token = 0; token < 3; ++token) ASSERT_TRUE(step(cache, random).empty());
    }
  }
}

TEST_F(UnitCacheTest, AFailureThatNobodyWaitedForIsNotReported) {
  const Engine engine = faulty_engine();
  faults_->fail(Op::read, 0, EIO);
  UnitCache cache = open_cache(engine, 4);
  ASSERT_TRUE(request(cache, {0}));
  while (cache.stats().failed == 0) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(request(cache, {0}));
  EXPECT_TRUE(use(cache, 0));
}

TEST_F(UnitCacheTest, DisturbedCompletionsChangeNothing) {
  for (std::uint64_t seed = 0; seed < test::scaled(12U); ++seed) {
    const Engine engine = faulty_engine();
    faults_->disturb(seed, 0.2, 0.2);
    UnitCache cache = open_cache(engine, 5, {.verify = StreamVerify::always});
    for (int token = 0; token < 5; ++token) ASSERT_TRUE(step(cache, random_).empty());
  }
}

TEST_F(UnitCacheTest, DestructionWaitsForReadsInFlight) {
  for (const std::uint64_t first : {0U, 3U, 7U}) {
    const Engine engine = faulty_engine();
    faults_->hold(Op::read, first, 3);
    auto cache = std::make_unique<UnitCache>(open_cache(engine, 4));
    ASSERT_TRUE(request(*cache, {0, 1, 2}));
    while (faults_->commands(Op::read) < first + 1) std::this_thread::sleep_for(1ms);
    auto ended = std::async(std::launch::async, [&] { cache.reset(); });
    EXPECT_EQ(ended.wait_for(30ms), std::future_status::timeout);
    faults_->release();
    ended.get();
  }
}

TEST_F(UnitCacheTest, AFlippedBitIsFoundWheneverItIsReadFirst) {
  for (const StreamVerify verify : {StreamVerify::once, StreamVerify::always}) {
    stored_ = store_plain(make_engine(), std::vector<std::uint64_t>(16, kUnitBytes));
    flip(5, 299'999);
    const Engine engine = make_engine();
    UnitCache cache = open_cache(engine, 3, {.verify = verify});
    EXPECT_TRUE(use(cache, 4));
    for (int round = 0; round < 2; ++round) {
      const auto damaged = use(cache, 5);
      ASSERT_FALSE(damaged);
      EXPECT_EQ(damaged.error().kind, ErrorKind::corrupt);
      EXPECT_NE(damaged.error().message.find("unit 5"), std::string::npos);
    }
    flip(5, 299'999, 0);
    EXPECT_TRUE(use(cache, 5));
  }
}

TEST_F(UnitCacheTest, AModifiedFileIsCheckedAgainWhenItIsReadAgain) {
  const Engine engine = make_engine();
  UnitCache cache = open_cache(engine, 2);
  for (const std::size_t unit : {0U, 1U, 2U}) ASSERT_TRUE(use(cache, unit));
  flip(0, 17);
  const auto damaged = use(cache, 0);
  ASSERT_FALSE(damaged);
  EXPECT_EQ(damaged.error().kind, ErrorKind::corrupt);
  const std::uint64_t before = cache.stats().verify_ns;
  for (const std::size_t unit : {1U, 2U}) EXPECT_TRUE(use(cache, unit)) << "of the same file, but unchanged";
  EXPECT_GT(cache.stats().verify_ns, before);
}

}  // namespace
}  // namespace trunkline
