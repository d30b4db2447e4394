#include "records/sample_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <span>

namespace trunkline::records {
namespace {

// Of all ranks, step by step, from `cursor` to the end of its epoch.
std::vector<std::vector<std::uint64_t>> steps_of(OrderOptions options, OrderCursor cursor) {
  std::vector<std::vector<std::uint64_t>> steps;
  const std::uint64_t epoch = cursor.epoch;
  while (cursor.epoch == epoch) {
    std::vector<std::uint64_t> samples;
    OrderCursor end;
    for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
      const SampleOrder order(options);
      const Step step = order.step(cursor);
      EXPECT_EQ(step.last, step.end.epoch != epoch);
      if (options.rank > 0) {
        EXPECT_EQ(step.end, end);
      }
      end = step.end;
      EXPECT_GE(step.count, 1U);
      EXPECT_LE(step.count, options.batch_size);
      const auto of_rank = order.samples_of(step);
      samples.insert(samples.end(), of_rank.begin(), of_rank.end());
    }
    steps.push_back(samples);
    cursor = end;
  }
  EXPECT_EQ(cursor, (OrderCursor{epoch + 1, 0}));
  return steps;
}

std::vector<std::uint64_t> joined(const std::vector<std::vector<std::uint64_t>>& steps) {
  std::vector<std::uint64_t> all;
  for (const auto& step : steps) all.insert(all.end(), step.begin(), step.end());
  return all;
}

TEST(SampleOrder, EveryEpochHoldsEverySampleOnce) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    const OrderOptions options{.samples = 1 + random() % 500,
                               .batch_size = 1 + random() % 20,
                               .ranks = 1 + random() % 5,
                               .block = random() % 12,
                               .seed = random()};
    const auto steps = steps_of(options, {random() % 3, 0});
    EXPECT_EQ(steps.size(), SampleOrder(options).steps_per_epoch());
    auto all = joined(steps);
    // Where the last step had fewer samples than ranks, some were repeated at its end.
    ASSERT_GE(all.size(), options.samples);
    ASSERT_LT(all.size(), options.samples + options.ranks);
    all.resize(options.samples);
    std::ranges::sort(all);
    for (std::uint64_t sample = 0; sample < options.samples; ++sample) ASSERT_EQ(all[sample], sample);
  }
}

TEST(SampleOrder, WithoutTheLastStepAllBatchesAreWhole) {
  const OrderOptions options{.samples = 103, .batch_size = 8, .ranks = 3, .drop_last = true};
  const auto steps = steps_of(options, {});
  ASSERT_EQ(steps.size(), 4U);
  for (const auto& step : steps) EXPECT_EQ(step.size(), 24U);
  EXPECT_EQ(SampleOrder(options).steps_per_epoch(), 4U);
  EXPECT_EQ(SampleOrder(options).normalized({2, 96}), (OrderCursor{3, 0}));
}

TEST(SampleOrder, IsTheSameForAnyNumberOfRanks) {
  OrderOptions options{.samples = 240, .batch_size = 24, .ranks = 1, .seed = 8};
  const auto alone = joined(steps_of(options, {1, 0}));
  options.ranks = 4;
  options.batch_size = 6;
  EXPECT_EQ(joined(steps_of(options, {1, 0})), alone);
  options.ranks = 3;
  options.batch_size = 10;
  EXPECT_EQ(joined(steps_of(options, {1, 0})), alone);
}

TEST(SampleOrder, GoesOnAtAnyPositionWithOtherRanks) {
  OrderOptions options{.samples = 100, .batch_size = 5, .ranks = 2, .seed = 4};
  const auto whole = joined(steps_of(options, {}));
  options.ranks = 3;
  auto rest = joined(steps_of(options, {0, 30}));
  rest.resize(70);
  EXPECT_TRUE(std::ranges::equal(rest, std::span(whole).subspan(30, 70)));
}

TEST(SampleOrder, EpochsAndSeedsDiffer) {
  const auto first = [](std::uint64_t seed, std::uint64_t epoch, std::uint64_t block) {
    return joined(steps_of({.samples = 64, .batch_size = 8, .block = block, .seed = seed}, {epoch, 0}));
  };
  for (const std::uint64_t block : {1, 4}) {
    EXPECT_NE(first(0, 0, block), first(0, 1, block));
    EXPECT_NE(first(0, 0, block), first(1, 0, block));
    EXPECT_EQ(first(5, 2, block), first(5, 2, block));
  }
}

TEST(SampleOrder, WithoutShuffleIsTheOrderOfTheData) {
  const auto all = joined(steps_of({.samples = 10, .batch_size = 3, .block = 0}, {7, 0}));
  EXPECT_EQ(all, (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(SampleOrder, BlocksStayTogether) {
  const OrderOptions options{.samples = 103, .batch_size = 8, .block = 8, .seed = 1};
  const EpochOrder order(options, 2);
  std::set<std::uint64_t> starts;
  for (std::uint64_t position = 0; position < 96; ++position) {
    if (position % 8 == 0) {
      starts.insert(order.sample_at(position));
    } else {
      EXPECT_EQ(order.sample_at(position), (order.sample_at(position - 1) + 1) % 103);
    }
  }
  EXPECT_EQ(starts.size(), 12U);
}

}  // namespace
}  // namespace trunkline::records
