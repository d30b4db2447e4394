// Histograms of durations.
#include "workload/duration_histogram.h"

#include <gtest/gtest.h>

#include <limits>

namespace trunkline::workload {
namespace {

TEST(DurationHistogram, EachValueIsCountedWithinOneInAHundredTwentyEight) {
  for (std::int64_t value = 0; value < std::numeric_limits<std::int64_t>::max() / 3;
       value = value * 3 / 2 + 1) {
    DurationHistogram histogram;
    histogram.add(value);
    const auto counts = histogram.counts();
    ASSERT_EQ(counts.size(), 1);
    EXPECT_EQ(counts[0].second, 1);
    EXPECT_GE(counts[0].first, static_cast<std::uint64_t>(value));
    EXPECT_LE(counts[0].first - static_cast<std::uint64_t>(value), static_cast<std::uint64_t>(value) / 128);
  }
}

TEST(DurationHistogram, CountsAreAscendingAndComplete) {
  DurationHistogram histogram;
  EXPECT_EQ(histogram.count(), 0);
  EXPECT_TRUE(histogram.counts().empty());
  for (const std::int64_t value : {500'000, 3, 500'001, 0, -7, 3}) histogram.add(value);
  EXPECT_EQ(histogram.count(), 6);
  const auto counts = histogram.counts();
  ASSERT_EQ(counts.size(), 3);
  EXPECT_EQ(counts[0], std::pair(std::uint64_t{0}, std::uint64_t{2}));
  EXPECT_EQ(counts[1], std::pair(std::uint64_t{3}, std::uint64_t{2}));
  EXPECT_EQ(counts[2].second, 2);
}

}  // namespace
}  // namespace trunkline::workload
