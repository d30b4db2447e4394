// The time line of an emulated accelerator, in numbers.
#include "workload/accelerator.h"

#include <gtest/gtest.h>

namespace trunkline::workload {
namespace {

TEST(Accelerator, StepsFollowEachOtherWhereBatchesAreReady) {
  Accelerator accelerator(1);
  accelerator.resume(0);
  accelerator.begin_epoch();
  accelerator.step(0, 40, 100);     // the first waits 40: 40 .. 140
  accelerator.step(50, 60, 100);    // ready while the first computes: 140 .. 240
  accelerator.step(150, 240, 100);  // just in time: 240 .. 340
  EXPECT_EQ(accelerator.end(), 340);
  const AcceleratorStats& stats = accelerator.stats();
  EXPECT_EQ(stats.steps, 3);
  EXPECT_EQ(stats.busy_ns, 300);
  EXPECT_EQ(stats.running_ns, 340);
  EXPECT_EQ(stats.first_busy_ns, 100);
  EXPECT_EQ(stats.first_running_ns, 140);
  EXPECT_EQ(stats.late_loop_ns, 0);
  EXPECT_EQ(stats.step_times.count(), 2);
  ASSERT_EQ(stats.epochs.size(), 1);
  EXPECT_EQ(stats.epochs[0].steps, 3);
  EXPECT_EQ(stats.epochs[0].busy_ns, 200);
  EXPECT_EQ(stats.epochs[0].running_ns, 200);
}

TEST(Accelerator, LateBatchesAreTimeWithoutComputation) {
  Accelerator accelerator(1);
  accelerator.resume(0);
  accelerator.begin_epoch();
  accelerator.step(0, 0, 100);
  accelerator.step(10, 150, 100, 30);  // data 50 late: 150 .. 250
  const AcceleratorStats& stats = accelerator.stats();
  EXPECT_EQ(stats.busy_ns, 200);
  EXPECT_EQ(stats.running_ns, 250);
  EXPECT_EQ(stats.epochs[0].busy_ns, 100);
  EXPECT_EQ(stats.epochs[0].running_ns, 150);
  EXPECT_EQ(stats.late_loop_ns, 0);
  EXPECT_EQ(stats.waits.count(), 1);
  EXPECT_EQ(stats.waits.counts().front().first, 50);
  ASSERT_EQ(stats.time_line.buckets().size(), 1);
  EXPECT_EQ(stats.time_line.buckets()[0].compute_ns, 200);
  EXPECT_EQ(stats.time_line.buckets()[0].wait_ns, 50);
  EXPECT_EQ(stats.time_line.buckets()[0].bytes, 30);
}

TEST(Accelerator, ALateLoopIsToldFromLateData) {
  Accelerator accelerator(0);
  accelerator.resume(0);
  accelerator.begin_epoch();
  accelerator.step(0, 0, 100);
  accelerator.step(130, 130, 100);  // asked 30 late, and it was there: 130 .. 230
  EXPECT_EQ(accelerator.stats().late_loop_ns, 30);
  accelerator.step(250, 300, 100);  // asked 20 late, and it came 50 after that
  EXPECT_EQ(accelerator.stats().late_loop_ns, 50);
  EXPECT_EQ(accelerator.stats().running_ns, 400);
  EXPECT_EQ(accelerator.stats().epochs[0].busy_ns, 300);
  EXPECT_EQ(accelerator.stats().epochs[0].running_ns, 400);
}

TEST(Accelerator, APauseCountsNowhere) {
  Accelerator accelerator(1);
  accelerator.resume(0);
  accelerator.begin_epoch();
  accelerator.step(0, 0, 100);
  accelerator.step(0, 0, 100);
  accelerator.pause();
  EXPECT_EQ(accelerator.end(), std::nullopt);
  accelerator.resume(5000);
  accelerator.resume(6000);  // it runs already
  accelerator.begin_epoch();
  accelerator.step(6000, 6010, 100);
  accelerator.step(6020, 6020, 100);
  const AcceleratorStats& stats = accelerator.stats();
  EXPECT_EQ(stats.busy_ns, 400);
  EXPECT_EQ(stats.running_ns, 200 + 1210);
  EXPECT_EQ(stats.step_times.count(), 2);
  ASSERT_EQ(stats.epochs.size(), 2);
  EXPECT_EQ(stats.epochs[1].busy_ns, 100);
  EXPECT_EQ(stats.epochs[1].running_ns, 100);
}

TEST(Accelerator, APauseWithinAnEpochCountsNowhere) {
  Accelerator accelerator(1);
  accelerator.resume(0);
  accelerator.begin_epoch();
  accelerator.step(0, 0, 100);
  accelerator.step(100, 100, 100);  // 100 .. 200
  accelerator.pause();
  accelerator.resume(5000);
  accelerator.step(5000, 5010, 100);  // 5010 .. 5110
  const AcceleratorStats& stats = accelerator.stats();
  EXPECT_EQ(stats.running_ns, 310);
  EXPECT_EQ(stats.epochs[0].busy_ns, 200);
  EXPECT_EQ(stats.epochs[0].running_ns, 210);
}

}  // namespace
}  // namespace trunkline::workload
