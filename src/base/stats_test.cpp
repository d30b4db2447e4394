#include "trunkline/stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace trunkline {
namespace {

// Nearest rank in a sorted list.
std::uint64_t exact_percentile(const std::vector<std::uint64_t>& sorted, double percent) {
  const auto rank = static_cast<std::size_t>(std::ceil(percent / 100 * static_cast<double>(sorted.size())));
  return sorted[std::max<std::size_t>(rank, 1) - 1];
}

void expect_close(std::uint64_t measured, std::uint64_t exact) {
  EXPECT_GE(measured, exact);
  EXPECT_LE(measured - exact, exact / LatencyHistogram::kSubBuckets);
}

TEST(LatencyHistogram, IsZeroWhenEmpty) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.count(), 0U);
  EXPECT_EQ(histogram.percentile(50), 0U);
  EXPECT_EQ(histogram.mean_ns(), 0.0);
}

TEST(LatencyHistogram, EveryPercentileIsWithinOneSixteenthOfTheExactOne) {
  std::mt19937_64 random(3);
  LatencyHistogram histogram;
  std::vector<std::uint64_t> model;
  double sum = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::uint64_t ns = random() >> (24 + random() % 40);  // all magnitudes up to 18 minutes
    histogram.add(ns);
    model.push_back(ns);
    sum += static_cast<double>(ns);
  }
  std::ranges::sort(model);
  for (const double percent : {0.0, 0.001, 1.0, 25.0, 50.0, 75.0, 90.0, 99.0, 99.9, 99.99, 100.0})
    expect_close(histogram.percentile(percent), exact_percentile(model, percent));
  EXPECT_EQ(histogram.count(), model.size());
  EXPECT_NEAR(histogram.mean_ns(), sum / 20'000, sum / 20'000 * 1e-9);
}

TEST(LatencyHistogram, BucketEdges) {
  for (unsigned bit = 0; bit < 63; ++bit) {
    for (const std::uint64_t ns : {(1ULL << bit) - 1, 1ULL << bit, (1ULL << bit) + 1}) {
      LatencyHistogram histogram;
      histogram.add(ns);
      expect_close(histogram.percentile(50), ns);
    }
  }
}

TEST(LatencyHistogram, TheLongestDurationsAreCountedInTheLastBucket) {
  LatencyHistogram histogram;
  histogram.add(std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(histogram.count(), 1U);
  EXPECT_EQ(histogram.percentile(100), (1ULL << 63) - 1);
}

TEST(LatencyHistogram, MergesAndSubtracts) {
  LatencyHistogram before;
  for (std::uint64_t ns = 1; ns <= 100; ++ns) before.add(ns * 1000);
  LatencyHistogram after = before;
  LatencyHistogram interval;
  for (std::uint64_t ns = 1; ns <= 50; ++ns) {
    after.add(ns);
    interval.add(ns);
  }
  LatencyHistogram difference = after;
  difference.subtract(before);
  EXPECT_EQ(difference.count(), interval.count());
  EXPECT_EQ(difference.mean_ns(), interval.mean_ns());
  LatencyHistogram merged = before;
  merged.add(interval);
  for (const double percent : {1.0, 10.0, 50.0, 90.0, 100.0}) {
    EXPECT_EQ(difference.percentile(percent), interval.percentile(percent));
    EXPECT_EQ(merged.percentile(percent), after.percentile(percent));
  }
}

}  // namespace
}  // namespace trunkline
