// Table tests of a cache's decisions. cache_replay_test.cpp compares its hit rates with those of other
// policies.
#include "stream/cache_schedule.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace trunkline {
namespace {

constexpr std::size_t kNone = CacheSchedule::kNone;
using Units = std::vector<std::size_t>;

std::vector<CacheSchedule::Place> one_group(std::size_t units) { return {units, {.group = 0, .pool = 0}}; }

std::vector<UnitUse> uses(const Units& units) {
  std::vector<UnitUse> made;
  for (const std::size_t unit : units) made.push_back({.unit = unit});
  return made;
}

// The reads that are started now.
std::vector<std::pair<std::size_t, std::size_t>> reads(CacheSchedule& schedule) {
  std::vector<std::pair<std::size_t, std::size_t>> made;
  while (const auto read = schedule.next()) made.emplace_back(read->unit, read->evicted);
  return made;
}

using Reads = std::vector<std::pair<std::size_t, std::size_t>>;

TEST(CacheSchedule, ReadsOnlyWhatIsMissingInTheOrderOfItsUse) {
  const std::vector<std::size_t> slots{4};
  CacheSchedule schedule(one_group(8), slots, 4);
  EXPECT_EQ(reads(schedule), Reads{}) << "nothing is requested";
  schedule.request(0, uses({5, 2}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{5, kNone}, {2, kNone}}));
  schedule.request(0, uses({2, 7, 5, 1}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{7, kNone}, {1, kNone}}));
  EXPECT_EQ(reads(schedule), Reads{});
}

TEST(CacheSchedule, EvictsTheUnitThatIsUsedLeast) {
  const std::vector<std::size_t> slots{3};
  CacheSchedule schedule(one_group(6), slots, 3);
  for (const Units& step : {Units{0, 1, 2}, Units{0, 2}, Units{0}}) {
    schedule.request(0, uses(step), 1);
    reads(schedule);
    for (const std::size_t unit : step) schedule.finish(unit);
  }
  schedule.request(0, uses({4}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{4, 1}}));
  schedule.finish(4);
  schedule.request(0, uses({5}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{5, 4}})) << "the others have been used more often";
}

TEST(CacheSchedule, KeepsWhatTheRequestNeeds) {
  const std::vector<std::size_t> slots{2};
  CacheSchedule schedule(one_group(6), slots, 2);
  schedule.request(0, uses({0, 1}), 1);
  reads(schedule);
  schedule.request(0, uses({2, 3, 1}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{2, 0}})) << "1 is used later";
  EXPECT_EQ(reads(schedule), Reads{});
  schedule.finish(2);
  EXPECT_EQ(reads(schedule), (Reads{{3, 2}}));
}

TEST(CacheSchedule, AReadThatCannotWaitEvictsWhatIsNeededLast) {
  const std::vector<std::size_t> slots{2};
  CacheSchedule schedule(one_group(6), slots, 2);
  schedule.request(0, uses({0, 1}), 1);
  reads(schedule);
  schedule.request(0, uses({3, 0, 1}), 1);
  EXPECT_EQ(reads(schedule), Reads{});
  EXPECT_EQ(schedule.read_now(3).value_or(CacheSchedule::Read{}).evicted, 1U);
  schedule.finish(3);
  EXPECT_EQ(reads(schedule), (Reads{{1, 3}})) << "which is then read again";
}

TEST(CacheSchedule, DoesNotEvictWhatIsInUse) {
  const std::vector<std::size_t> slots{2};
  CacheSchedule schedule(one_group(6), slots, 2);
  schedule.request(0, uses({0, 1}), 1);
  reads(schedule);
  for (const std::size_t slot : {0U, 1U}) schedule.set_in_use(slot, true);
  schedule.request(0, uses({2}), 1);
  EXPECT_EQ(reads(schedule), Reads{});
  EXPECT_FALSE(schedule.read_now(2));
  schedule.set_in_use(1, false);
  EXPECT_EQ(reads(schedule), (Reads{{2, 1}}));
}

TEST(CacheSchedule, ReadsNoFurtherAheadThanAllowed) {
  const std::vector<std::size_t> slots{5};
  CacheSchedule schedule(one_group(8), slots, 2);
  schedule.request(0, uses({0, 1, 2, 3}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{0, kNone}, {1, kNone}}));
  schedule.finish(1);
  EXPECT_EQ(reads(schedule), (Reads{{2, kNone}}));
  schedule.vacate(schedule.slot_of(0));  // it could not be read
  EXPECT_EQ(reads(schedule), (Reads{{3, kNone}}));
}

TEST(CacheSchedule, PoolsHaveTheirOwnSlots) {
  const std::vector<CacheSchedule::Place> places{{0, 0}, {0, 1}, {0, 0}, {0, 1}};
  const std::vector<std::size_t> slots{1, 2};
  CacheSchedule schedule(places, slots, 2);
  schedule.request(0, uses({0, 1, 2, 3}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{0, kNone}, {1, kNone}, {3, kNone}}));
  EXPECT_EQ(schedule.slot_of(0), 0U);
  EXPECT_GE(schedule.slot_of(1), 1U);
  schedule.finish(0);
  EXPECT_EQ(reads(schedule), (Reads{{2, 0}}));
}

TEST(CacheSchedule, ExpectedUnitsAreReadLastAndCountAsUnused) {
  const std::vector<std::size_t> slots{3};
  const Units expected{4, 5};
  CacheSchedule schedule(one_group(6), slots, 2);
  schedule.request(0, uses({0, 1}), 1, expected);
  EXPECT_EQ(reads(schedule), (Reads{{0, kNone}, {1, kNone}}));
  schedule.finish(0);
  schedule.finish(1);
  EXPECT_EQ(reads(schedule), (Reads{{4, kNone}, {5, 0}}));
  schedule.request(0, uses({0}), 1);
  EXPECT_EQ(reads(schedule), (Reads{{0, 5}})) << "they were not needed";
}

TEST(UseRates, AStepOfManyTokensCountsAsManySteps) {
  const std::vector<UnitUse> all{{.unit = 0, .tokens = 64}, {.unit = 1, .tokens = 32}};
  UseRates many({0, 0, 0});
  many.record(0, all, 64);
  EXPECT_GT(many.rate(0), many.rate(1));
  EXPECT_GT(many.rate(1), 0.0);
  EXPECT_EQ(many.rate(2), 0.0);
  UseRates one({0, 0, 0});
  one.record(0, std::vector<UnitUse>{{.unit = 0}}, 1);
  EXPECT_GT(many.rate(0), 10 * one.rate(0));
}

TEST(UseRates, WhatWasUsedInTheLongRunIsRestored) {
  UseRates rates({0, 0, 1});
  for (int step = 0; step < 5; ++step) rates.record(0, std::vector<UnitUse>{{.unit = 1}}, 1);
  UseRates restored({0, 0, 1});
  restored.restore(rates.long_run());
  EXPECT_EQ(restored.long_run(), rates.long_run());
  EXPECT_GT(restored.rate(1), 0);
  EXPECT_EQ(restored.rate(0), 0);
  EXPECT_EQ(restored.rate(2), 0);
  restored.record(0, std::vector<UnitUse>{{.unit = 0}}, 1);
  EXPECT_GT(restored.long_run()[1], restored.long_run()[0]) << "what follows counts as before";
}

TEST(CacheSchedule, RestoredRatesDecideWhatIsEvicted) {
  const std::vector<std::size_t> slots{2};
  for (const std::size_t used : Units{0, 1}) {
    CacheSchedule schedule(one_group(3), slots, 2);
    std::vector<double> rates(3);
    rates[used] = 0.5;
    schedule.restore_use_rates(rates);
    for (const Units& step : {Units{0, 1}, Units{2}}) {
      schedule.request(0, uses(step), 1);
      const Reads made = reads(schedule);
      EXPECT_EQ(made, step.size() == 1 ? (Reads{{2, 1 - used}}) : (Reads{{0, kNone}, {1, kNone}}));
      for (const std::size_t unit : step) schedule.finish(unit);
    }
  }
}

TEST(UseRates, OnlyTokensOfItsOwnGroupMakeAUnitLessUsed) {
  UseRates rates({0, 1});
  rates.record(0, std::vector<UnitUse>{{.unit = 0}}, 1);
  const double rate = rates.rate(0);
  for (int step = 0; step < 10; ++step) rates.record(1, std::vector<UnitUse>{{.unit = 1}}, 1);
  EXPECT_EQ(rates.rate(0), rate);
  rates.record(0, {}, 1'000'000);
  EXPECT_EQ(rates.rate(0), 0.0);
}

TEST(CacheSchedule, AScanOfAllUnitsLeavesWhatIsUsedMost) {
  constexpr std::size_t kLayers = 4;
  std::vector<CacheSchedule::Place> places;
  for (std::size_t unit = 0; unit < kLayers * 16; ++unit) places.push_back({.group = unit / 16, .pool = 0});
  const std::vector<std::size_t> slots{16};
  CacheSchedule schedule(places, slots, 4);
  std::size_t hits = 0;
  for (int pass = 0; pass < 20; ++pass) {
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      std::vector<UnitUse> all;
      for (std::size_t unit = layer * 16; unit < layer * 16 + 16; ++unit) {
        all.push_back({.unit = unit, .tokens = unit % 16 < 4 ? 20U : 2U});
        hits += pass > 0 && schedule.slot_of(unit) != kNone ? 1U : 0U;
      }
      schedule.request(layer, all, 32);
      for (const UnitUse& use : all) {
        while (schedule.next()) {
        }
        if (schedule.slot_of(use.unit) == kNone) {
          ASSERT_TRUE(schedule.read_now(use.unit));
        }
        schedule.finish(use.unit);
      }
    }
  }
  // LRU would have none. Reading ahead takes 4 of the 16 slots.
  EXPECT_GE(hits, 19U * 10U);
}

}  // namespace
}  // namespace trunkline
