// Table tests of a cache's decisions, and its hit rates on traces beside those of other policies.
#include "stream/cache_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <utility>

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

// Which experts each layer uses for each token.
struct Trace {
  std::string name;
  std::size_t layers = 6;
  std::size_t experts = 32;
  std::vector<std::vector<Units>> tokens;  // [token][layer]: units
};

struct Router {
  double exponent = 0;           // of a Zipf distribution; 0: uniform
  double repeats = 0;            // probability that a token uses an expert of the one before
  std::size_t changes = 100000;  // after so many tokens other experts are popular
};

Trace make_trace(std::string name, const Router& router, std::size_t top_k = 4, std::size_t tokens = 1500) {
  std::mt19937_64 random(5);
  Trace trace{.name = std::move(name), .tokens = {}};
  std::vector<double> weights;
  for (std::size_t rank = 1; rank <= trace.experts; ++rank)
    weights.push_back(std::pow(static_cast<double>(rank), -router.exponent));
  std::discrete_distribution<std::size_t> rank(weights.begin(), weights.end());
  std::bernoulli_distribution repeats(router.repeats);
  std::vector<Units> ranked(trace.layers, Units(trace.experts));
  for (Units& of_layer : ranked) std::iota(of_layer.begin(), of_layer.end(), 0U);
  for (std::size_t token = 0; token < tokens; ++token) {
    trace.tokens.emplace_back();
    for (std::size_t layer = 0; layer < trace.layers; ++layer) {
      if (token % router.changes == 0) std::ranges::shuffle(ranked[layer], random);
      Units used;
      while (used.size() < top_k) {
        std::size_t unit = layer * trace.experts + ranked[layer][rank(random)];
        if (token > 0 && repeats(random)) unit = trace.tokens[token - 1][layer][random() % top_k];
        if (std::ranges::find(used, unit) == used.end()) used.push_back(unit);
      }
      trace.tokens[token].push_back(std::move(used));
    }
  }
  return trace;
}

double hit_rate(std::size_t hits, const Trace& trace) {
  return 100.0 * static_cast<double>(hits) /
         static_cast<double>(trace.tokens.size() * trace.layers * trace.tokens[0][0].size());
}

double of_schedule(const Trace& trace, std::size_t count) {
  std::vector<CacheSchedule::Place> places;
  for (std::size_t unit = 0; unit < trace.layers * trace.experts; ++unit)
    places.push_back({.group = unit / trace.experts, .pool = 0});
  const std::vector<std::size_t> slots{count};
  CacheSchedule schedule(places, slots, 8);
  std::size_t hits = 0;
  for (const auto& token : trace.tokens) {
    for (std::size_t layer = 0; layer < trace.layers; ++layer) {
      for (const std::size_t unit : token[layer]) hits += schedule.slot_of(unit) != kNone ? 1 : 0;
      schedule.request(layer, uses(token[layer]), 1);
      for (const std::size_t unit : token[layer]) {
        while (schedule.next()) {
        }
        if (schedule.slot_of(unit) == kNone) {
          EXPECT_TRUE(schedule.read_now(unit));
        }
        schedule.finish(unit);
      }
    }
  }
  return hit_rate(hits, trace);
}

// A cache that evicts the unit with the lowest value, but none of the present step: all of its misses are
// read at once. `value` is called for each use.
double of_values(const Trace& trace, std::size_t count,
                 const std::function<double(std::size_t unit, double now)>& value) {
  std::vector<double> values(trace.layers * trace.experts);
  std::vector<bool> cached(values.size());
  std::size_t hits = 0;
  std::size_t filled = 0;
  double now = 0;
  for (const auto& token : trace.tokens) {
    for (const Units& used : token) {
      for (const std::size_t unit : used) {
        values[unit] = value(unit, ++now);
        if (cached[unit]) {
          ++hits;
          continue;
        }
        if (filled == count) {
          std::size_t lowest = kNone;
          for (std::size_t other = 0; other < values.size(); ++other) {
            if (!cached[other] || std::ranges::find(used, other) != used.end()) continue;
            if (lowest == kNone || values[other] < values[lowest]) lowest = other;
          }
          cached[lowest] = false;
        } else {
          ++filled;
        }
        cached[unit] = true;
      }
    }
  }
  return hit_rate(hits, trace);
}

double of_lru(const Trace& trace, std::size_t count) {
  return of_values(trace, count, [](std::size_t, double now) { return now; });
}

double of_lfu(const Trace& trace, std::size_t count) {
  std::vector<double> used(trace.layers * trace.experts);
  return of_values(trace, count, [&](std::size_t unit, double) { return used[unit] += 1; });
}

// A fixed choice by what the first half of the trace uses, beside the slots that misses pass through.
double of_static(const Trace& trace, std::size_t count) {
  std::vector<std::size_t> used(trace.layers * trace.experts);
  for (std::size_t token = 0; token < trace.tokens.size() / 2; ++token) {
    for (const Units& units : trace.tokens[token]) {
      for (const std::size_t unit : units) ++used[unit];
    }
  }
  Units chosen(used.size());
  std::iota(chosen.begin(), chosen.end(), 0U);
  std::ranges::sort(chosen, std::ranges::greater{}, [&](std::size_t unit) { return used[unit]; });
  chosen.resize(count - trace.tokens[0][0].size());
  std::size_t hits = 0;
  for (const auto& token : trace.tokens) {
    for (const Units& units : token) {
      for (const std::size_t unit : units) hits += std::ranges::find(chosen, unit) != chosen.end() ? 1U : 0U;
    }
  }
  return hit_rate(hits, trace);
}

TEST(CacheSchedule, HitsAreAtMostTwoPointsBelowTheBestOfLruLfuAndStatic) {
  const std::vector<Trace> traces{
      make_trace("uniform", {}),
      make_trace("Zipf 1.0", {.exponent = 1.0}),
      make_trace("Zipf 0.7", {.exponent = 0.7}),
      make_trace("repeating", {.repeats = 0.5}),
      make_trace("Zipf 1.0, repeating", {.exponent = 1.0, .repeats = 0.3}),
      make_trace("Zipf 1.0, changing", {.exponent = 1.0, .changes = 300}),
      make_trace("top 1", {.exponent = 1.0}, 1, 4500),
  };
  for (const Trace& trace : traces) {
    // Of 192 units; the working set of a token is 24.
    for (const std::size_t slots : {12U, 24U, 48U, 96U}) {
      const double best = std::max({of_lru(trace, slots), of_lfu(trace, slots), of_static(trace, slots)});
      const double found = of_schedule(trace, slots);
      EXPECT_GE(found, best - 2.0) << trace.name << ", " << slots << " slots: lru " << of_lru(trace, slots)
                                   << ", lfu " << of_lfu(trace, slots) << ", static "
                                   << of_static(trace, slots);
    }
  }
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
