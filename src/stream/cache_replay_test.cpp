// Replays of routings by hand, and hit rates of the schedule on made-up routings beside those of other
// policies.
#include "stream/cache_replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <utility>

namespace trunkline {
namespace {

using Experts = std::vector<std::size_t>;

ReplayStep step(std::size_t module, const Experts& experts, std::uint64_t tokens = 1) {
  ReplayStep made{.module = module, .tokens = tokens, .uses = {}};
  for (const std::size_t expert : experts) made.uses.push_back({.unit = expert});
  return made;
}

CacheReplay replay_of(std::vector<ReplayModule> modules, std::vector<ReplayStep> steps) {
  auto made = CacheReplay::create(std::move(modules), std::move(steps));
  EXPECT_TRUE(made);
  return std::move(*made);
}

TEST(CacheReplay, CountsHitsOfAllMatricesAndReadsOfEachPool) {
  const CacheReplay replay =
      replay_of({{.experts = 4, .pools = {0, 1}}}, {step(0, {0, 1}), step(0, {1, 2}), step(0, {0, 3}, 2)});
  EXPECT_EQ(replay.uses(), 12U);
  EXPECT_EQ(replay.used_units(), 8U);
  const std::array<std::size_t, 2> slots{3, 3};
  const auto [all, counted] = replay.replay(slots, 4, 2);
  EXPECT_EQ(all.steps, 3U);
  EXPECT_EQ(all.hits, 4U) << "1 in the second step, 0 in the third: that was used before 2, and as often";
  EXPECT_EQ(all.misses, 8U);
  EXPECT_EQ(all.units_read, (std::vector<std::uint64_t>{4, 4}));
  EXPECT_EQ(all.evictions, 2U);
  EXPECT_EQ(counted.steps, 1U);
  EXPECT_EQ(counted.hits + counted.misses, 4U);
  EXPECT_EQ(counted.evictions, 2U);
}

TEST(CacheReplay, OtherPoliciesByHand) {
  // 0 is used most, 2 last before the end.
  const CacheReplay replay =
      replay_of({{.experts = 4, .pools = {0}}}, {step(0, {0}), step(0, {0}), step(0, {1}), step(0, {2}),
                                                 step(0, {0}), step(0, {1}), step(0, {2}), step(0, {0})});
  const std::array<std::size_t, 1> two{2};
  EXPECT_EQ(replay.lru_hits(two), 1U) << "0 in the second step";
  EXPECT_EQ(replay.lfu_hits(two), 3U) << "0 in each but the first";
  const std::array<std::size_t, 1> three{3};
  EXPECT_EQ(replay.lru_hits(three), 5U) << "all but first uses";
  EXPECT_EQ(replay.static_hits(three, 2), 4U) << "0";
  EXPECT_EQ(replay.static_hits(three, 3), 0U);
  const std::array<std::size_t, 1> four{4};
  EXPECT_EQ(replay.static_hits(four, 2), 8U) << "nothing is missing";
}

TEST(CacheReplay, StepsThatUseMoreThanThereAreSlotsReadEachUnitOnce) {
  std::vector<ReplayStep> steps;
  for (std::size_t module = 0; module < 2; ++module) {
    steps.push_back(step(module, {0, 1, 2, 3, 4, 5, 6, 7}, 64));
    steps.back().expects_next = true;
  }
  const CacheReplay replay = replay_of({{.experts = 8, .pools = {0}}, {.experts = 8, .pools = {0}}}, steps);
  const std::array<std::size_t, 1> slots{4};
  const auto [all, counted] = replay.replay(slots, 2, 64);
  EXPECT_EQ(all.hits, 2U) << "of the second module, which were read ahead";
  EXPECT_EQ(all.units_read, (std::vector<std::uint64_t>{18})) << "two of them for the step to come";
  EXPECT_EQ(counted.units_read, all.units_read);
  EXPECT_EQ(replay.lru_hits(slots), 0U);
  EXPECT_EQ(replay.lfu_hits(slots), 0U);
}

TEST(CacheReplay, RejectsModulesAndExpertsThatDoNotExist) {
  const std::vector<ReplayModule> modules{{.experts = 4, .pools = {0}}};
  for (const ReplayStep& each : {step(1, {0}), step(0, {4})})
    EXPECT_EQ(CacheReplay::create(modules, {each}).error().kind, ErrorKind::invalid_argument);
}

struct Router {
  std::string name;
  double exponent = 0;           // of a Zipf distribution; 0: uniform
  double repeats = 0;            // probability that a token uses an expert of the one before
  std::size_t changes = 100000;  // after so many tokens other experts are popular
  std::size_t phases = 0;  // the popular experts are those of one of so many texts, in turns; 0: new ones
  std::size_t shifts = 100000;  // after so many tokens two experts exchange their ranks
  std::size_t top_k = 4;
  std::size_t tokens = 1500;
};

constexpr std::size_t kReplayLayers = 6;
constexpr std::size_t kExperts = 32;

// The popularity of a layer's experts over time.
class Popularity {
 public:
  explicit Popularity(const Router& router) : router_(router) {
    for (std::size_t text = 0; text < std::max<std::size_t>(router.phases, 1); ++text) {
      Experts ranked(kExperts);
      std::iota(ranked.begin(), ranked.end(), 0U);
      texts_.push_back(ranked);
    }
  }

  const Experts& at(std::size_t token, std::mt19937_64& random) {
    if (token == 0) {
      for (Experts& text : texts_) std::ranges::shuffle(text, random);
    } else if (router_.phases == 0 && token % router_.changes == 0) {
      std::ranges::shuffle(texts_[0], random);
    }
    Experts& now = texts_[token / router_.changes % texts_.size()];
    if (token % router_.shifts == 0) std::swap(now[random() % kExperts], now[random() % kExperts]);
    return now;
  }

 private:
  const Router& router_;
  std::vector<Experts> texts_;
};

std::vector<ReplayStep> routing(const Router& router) {
  std::mt19937_64 random(5);
  std::vector<double> weights;
  for (std::size_t rank = 1; rank <= kExperts; ++rank)
    weights.push_back(std::pow(static_cast<double>(rank), -router.exponent));
  std::discrete_distribution<std::size_t> rank(weights.begin(), weights.end());
  std::bernoulli_distribution repeats(router.repeats);
  std::vector<Popularity> popular(kReplayLayers, Popularity(router));
  std::vector<Experts> last(kReplayLayers);
  std::vector<ReplayStep> steps;
  for (std::size_t token = 0; token < router.tokens; ++token) {
    for (std::size_t layer = 0; layer < kReplayLayers; ++layer) {
      const Experts& ranked = popular[layer].at(token, random);
      Experts used;
      while (used.size() < router.top_k) {
        std::size_t expert = ranked[rank(random)];
        if (token > 0 && repeats(random)) expert = last[layer][random() % router.top_k];
        if (std::ranges::find(used, expert) == used.end()) used.push_back(expert);
      }
      steps.push_back(step(layer, used));
      last[layer] = std::move(used);
    }
  }
  return steps;
}

const std::vector<Router>& routers() {
  static const std::vector<Router> all{
      {.name = "uniform"},
      {.name = "Zipf 1.0", .exponent = 1.0},
      {.name = "Zipf 0.7", .exponent = 0.7},
      {.name = "repeating", .repeats = 0.5},
      {.name = "Zipf 1.0, repeating", .exponent = 1.0, .repeats = 0.3},
      {.name = "changing", .exponent = 1.0, .changes = 300},
      {.name = "shifting", .exponent = 1.0, .shifts = 10},
      {.name = "two texts in turns", .exponent = 1.0, .changes = 200, .phases = 2},
      {.name = "top 1", .exponent = 1.0, .top_k = 1, .tokens = 4500},
  };
  return all;
}

TEST(CacheReplay, HitsAreAtMostTwoPointsBelowTheBestOfLruLfuAndStatic) {
  for (const Router& router : routers()) {
    for (const auto& [pools, counts] :
         std::vector<std::pair<std::size_t, Experts>>{{1, {12, 24, 48, 96}}, {2, {48}}}) {
      std::vector<std::size_t> matrices(pools);
      std::iota(matrices.begin(), matrices.end(), 0U);
      const std::vector<ReplayModule> modules(kReplayLayers, {.experts = kExperts, .pools = matrices});
      const CacheReplay replay = replay_of(modules, routing(router));
      // Of 192 units in each pool; the working set of a token is 24.
      for (const std::size_t count : counts) {
        const std::vector<std::size_t> slots(pools, count);
        const auto points = [&](std::uint64_t hits) {
          return 100.0 * static_cast<double>(hits) / static_cast<double>(replay.uses());
        };
        const double lru = points(replay.lru_hits(slots));
        const double lfu = points(replay.lfu_hits(slots));
        const double fixed = points(replay.static_hits(slots, router.top_k));
        const double found = points(replay.replay(slots, 8, 1).all.hits);
        EXPECT_GE(found, std::max({lru, lfu, fixed}) - 2.0)
            << router.name << ", " << pools << " pools of " << count << " slots: lru " << lru << ", lfu "
            << lfu << ", static " << fixed;
      }
    }
  }
}

}  // namespace
}  // namespace trunkline
