#include "cli/bench/statistics.h"

#include <gtest/gtest.h>

#include "cli/bench/meter.h"

namespace trunkline::cli {
namespace {

TEST(Median, OfAnyCountAndOrder) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({4}), 4);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({8, 2, 4, 100}), 6);
}

TEST(Ratio, OfNothingIsZero) {
  EXPECT_EQ(ratio(3, 2), 1.5);
  EXPECT_EQ(ratio(3, 0), 0);
}

TEST(Difference, CountsWhatHappenedInBetween) {
  EngineStats before;
  before.bytes_direct = 10;
  before.errors = 1;
  before.read_latency.add(1000);
  EngineStats after = before;
  after.bytes_direct = 30;
  after.bytes_gds = 5;
  after.peak_pinned_bytes = 77;
  after.read_latency.add(2'000'000);
  const EngineStats between = difference(after, before);
  EXPECT_EQ(between.bytes_direct, 20U);
  EXPECT_EQ(between.bytes_gds, 5U);
  EXPECT_EQ(between.errors, 0U);
  EXPECT_EQ(between.peak_pinned_bytes, 77U);
  EXPECT_EQ(between.read_latency.count(), 1U);
  EXPECT_GT(between.read_latency.percentile(50), 1'800'000U);

  EngineStats total = between;
  accumulate(total, between);
  EXPECT_EQ(total.bytes_direct, 40U);
  EXPECT_EQ(total.read_latency.count(), 2U);
  EXPECT_EQ(total.peak_pinned_bytes, 77U);
}

}  // namespace
}  // namespace trunkline::cli
