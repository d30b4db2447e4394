// Time lines: what is in which bucket, and that nothing is lost when they become coarser.
#include "workload/time_line.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace trunkline::workload {
namespace {

constexpr std::int64_t kWidth = TimeLine::kFinestNs;

TimeBucket total(const TimeLine& line) {
  TimeBucket sum;
  for (const TimeBucket& each : line.buckets()) {
    sum.compute_ns += each.compute_ns;
    sum.wait_ns += each.wait_ns;
    sum.bytes += each.bytes;
  }
  return sum;
}

TEST(TimeLine, StepsAreDividedAmongBuckets) {
  TimeLine line;
  // Waits from 10.5 to 11.25, computes until 12.5.
  line.add_step(kWidth * 21 / 2, kWidth * 45 / 4, kWidth * 25 / 2, 800);
  EXPECT_EQ(line.width_ns(), kWidth);
  EXPECT_EQ(line.first(), 10);
  ASSERT_EQ(line.buckets().size(), 3);
  EXPECT_EQ(line.buckets()[0].wait_ns, kWidth / 2);
  EXPECT_EQ(line.buckets()[0].compute_ns, 0);
  EXPECT_EQ(line.buckets()[0].bytes, 200);
  EXPECT_EQ(line.buckets()[1].wait_ns, kWidth / 4);
  EXPECT_EQ(line.buckets()[1].compute_ns, kWidth * 3 / 4);
  EXPECT_EQ(line.buckets()[1].bytes, 400);
  EXPECT_EQ(line.buckets()[2].wait_ns, 0);
  EXPECT_EQ(line.buckets()[2].compute_ns, kWidth / 2);
  EXPECT_EQ(line.buckets()[2].bytes, 200);
}

TEST(TimeLine, LongRunsGetCoarserAndLoseNothing) {
  TimeLine line;
  std::int64_t time = kWidth * 7 + 13;
  constexpr std::int64_t kSteps = 20'000;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    line.add_step(time, time + 300'001, time + 1'000'003, 7'777);
    time += 1'000'003;
  }
  EXPECT_LE(line.buckets().size(), TimeLine::kMostBuckets);
  EXPECT_GT(line.buckets().size(), TimeLine::kMostBuckets / 2 - 2);
  EXPECT_EQ(line.width_ns() % kWidth, 0);
  const TimeBucket sum = total(line);
  EXPECT_EQ(sum.wait_ns, kSteps * 300'001);
  EXPECT_EQ(sum.compute_ns, kSteps * 700'002);
  EXPECT_EQ(sum.bytes, static_cast<std::uint64_t>(kSteps) * 7'777);
  // Buckets lie where they would if they had been as wide from the start.
  EXPECT_EQ(line.first(), (kWidth * 7 + 13) / line.width_ns());
  const TimeBucket& middle = line.buckets()[200];
  EXPECT_EQ(middle.wait_ns + middle.compute_ns, line.width_ns());
}

TEST(TimeLine, PausesAreEmptyAndStepsWithoutTimeCount) {
  TimeLine line;
  line.add_step(0, 0, 0, 5);
  line.add_step(0, 0, 0, 5);
  line.add_step(kWidth * 3, kWidth * 3, kWidth * 4, 6);
  ASSERT_EQ(line.buckets().size(), 5);
  EXPECT_EQ(line.buckets()[0].bytes, 10);
  EXPECT_EQ(line.buckets()[1].bytes, 0);
  EXPECT_EQ(line.buckets()[2].compute_ns, 0);
  EXPECT_EQ(line.buckets()[3].compute_ns, kWidth);
  EXPECT_EQ(total(line).bytes, 16);
}

TEST(TimeLine, AStepLongerThanAllBucketsFits) {
  TimeLine line;
  line.add_step(0, kWidth * 100'000, kWidth * 1'000'000, 1);
  EXPECT_LE(line.buckets().size(), TimeLine::kMostBuckets);
  EXPECT_EQ(total(line).wait_ns, kWidth * 100'000);
  EXPECT_EQ(total(line).bytes, 1);
}

}  // namespace
}  // namespace trunkline::workload
