// The loop of an emulated training, on a clock and a source that are under control.
#include "workload/training_loop.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "workload/shared_barrier.h"

namespace trunkline::workload {
namespace {

constexpr std::int64_t kLong = std::numeric_limits<std::int64_t>::max() / 4;

// Time passes only in sleeps and waits, and `lateness` more at the end of each sleep.
class LateClock final : public Clock {
 public:
  std::int64_t now() override { return now_; }
  void sleep_until(std::int64_t deadline) override {
    now_ = std::max(now_, deadline) + lateness;
    ++sleeps;
  }
  void advance_to(std::int64_t time) { now_ = std::max(now_, time); }

  std::int64_t lateness = 0;
  int sleeps = 0;

 private:
  std::int64_t now_ = 1'000'000;
};

// Batch number n is ready `ready(n)` after the start, and needs one of `slots` buffers.
class FakeSource final : public BatchSource {
 public:
  FakeSource(LateClock& clock, std::function<std::int64_t(std::uint64_t)> ready, std::uint64_t units,
             std::size_t slots = 100)
      : clock_(clock), start_(clock.now()), ready_(std::move(ready)), units_(units), slots_(slots) {}

  Result<SourceBatch> next(std::chrono::nanoseconds timeout) override {
    const auto held = static_cast<std::size_t>(token_.use_count() - 1);
    largest_held = std::max(largest_held, held);
    const std::int64_t time = start_ + ready_(number_);
    const std::int64_t limit = clock_.now() + timeout.count();
    if (held >= slots_ || time > limit) {
      clock_.advance_to(limit);
      return std::unexpected(make_error(ErrorKind::timed_out, "not there yet"));
    }
    clock_.advance_to(time);
    SourceBatch batch{.units = {}, .bytes = 10, .memory = token_};
    for (std::uint64_t unit = 0; unit < units_; ++unit) batch.units.push_back(number_ * units_ + unit);
    ++number_;
    return batch;
  }

  std::size_t largest_held = 0;

 private:
  LateClock& clock_;
  const std::int64_t start_;
  const std::function<std::int64_t(std::uint64_t)> ready_;
  const std::uint64_t units_;
  const std::size_t slots_;
  std::uint64_t number_ = 0;
  std::shared_ptr<int> token_ = std::make_shared<int>(0);
};

class TrainingLoopTest : public testing::Test {
 protected:
  TrainingStats run(std::function<std::int64_t(std::uint64_t)> ready, std::uint64_t steps,
                    std::int64_t limit = kLong, std::size_t slots = 100) {
    auto source = std::make_unique<FakeSource>(clock_, std::move(ready), 4, slots);
    FakeSource& seen = *source;
    TrainingLoop loop(std::move(source), {.batch_size = 4, .compute_ns = 1000}, clock_);
    loop.begin_epoch();
    while (true) {
      const auto done = loop.advance(steps, limit);
      if (!done) {
        ADD_FAILURE() << done.error().message;
        break;
      }
      if (*done) break;
    }
    largest_held_ = seen.largest_held;
    return loop.stats();
  }

  LateClock clock_;
  std::size_t largest_held_ = 0;
};

TEST_F(TrainingLoopTest, ReadyBatchesKeepTheAcceleratorBusyHoweverLateTheThreadWakes) {
  clock_.lateness = 300;
  const TrainingStats stats = run([](std::uint64_t) { return 0; }, 50);
  EXPECT_EQ(stats.accelerator.steps, 50);
  EXPECT_EQ(stats.samples, 200);
  EXPECT_EQ(stats.bytes, 500);
  EXPECT_EQ(stats.accelerator.busy_ns, 50'000);
  EXPECT_EQ(stats.accelerator.running_ns, 50'000);
  EXPECT_EQ(stats.accelerator.late_loop_ns, 0);
  EXPECT_EQ(clock_.sleeps, 50);  // once in a step
}

TEST_F(TrainingLoopTest, WhatTheThreadCannotKeepUpWithIsLost) {
  clock_.lateness = 1500;  // more than a step
  const TrainingStats stats = run([](std::uint64_t) { return 0; }, 50);
  EXPECT_EQ(stats.accelerator.busy_ns, 50'000);
  EXPECT_EQ(stats.accelerator.running_ns, 62'000);  // every other step starts 500 late
  EXPECT_EQ(stats.accelerator.late_loop_ns, 12'000);
}

TEST_F(TrainingLoopTest, SlowDataIsWaitedFor) {
  const TrainingStats stats =
      run([](std::uint64_t number) { return static_cast<std::int64_t>(number) * 2500; }, 10);
  EXPECT_EQ(stats.accelerator.busy_ns, 10'000);
  EXPECT_EQ(stats.accelerator.running_ns, 9 * 2500 + 1000);
  EXPECT_EQ(stats.accelerator.late_loop_ns, 0);
  EXPECT_EQ(stats.accelerator.waits.count(), 9);
}

TEST_F(TrainingLoopTest, MemoryIsReleasedWhenItsStepEnds) {
  // With two buffers, one is read into while the other's step computes; the loop must not hold both for long.
  const TrainingStats stats = run([](std::uint64_t) { return 0; }, 20, kLong, 2);
  EXPECT_EQ(stats.accelerator.running_ns, 20'000);
  EXPECT_LE(largest_held_, 2);
  // With one, each read begins when the step before has ended.
  const TrainingStats one = run([](std::uint64_t) { return 0; }, 20, kLong, 1);
  EXPECT_EQ(one.accelerator.steps, 20);
  EXPECT_LE(largest_held_, 1);
}

TEST_F(TrainingLoopTest, LimitsChangeNothing) {
  const auto ready = [](std::uint64_t number) {
    return static_cast<std::int64_t>(number) * 700 + number % 7 * 400;
  };
  const TrainingStats whole = run(ready, 30);
  const TrainingStats sliced = run(ready, 30, 90);
  EXPECT_EQ(sliced.accelerator.busy_ns, whole.accelerator.busy_ns);
  EXPECT_EQ(sliced.accelerator.running_ns, whole.accelerator.running_ns);
  EXPECT_EQ(sliced.bytes, whole.bytes);
}

TEST_F(TrainingLoopTest, StepsThatNeedPartsOfUnits) {
  // Reads of 2 units of 6 samples, but for the third of each file, which has 3; steps of 16.
  auto source = std::make_unique<FakeSource>(clock_, [](std::uint64_t) { return 0; }, 2);
  TrainingLoop loop(std::move(source),
                    {.batch_size = 16,
                     .unit_samples = {.each = 6, .units_per_file = 3, .last_in_file = 3},
                     .compute_ns = 1000},
                    clock_);
  loop.begin_epoch();
  const auto done = loop.advance(10, kLong);
  ASSERT_TRUE(done && *done);
  const TrainingStats stats = loop.stats();
  EXPECT_EQ(stats.samples, 160);
  // 15 samples in 3 units, 160 in 32: 16 reads of 10 bytes.
  EXPECT_EQ(stats.bytes, 160);
  EXPECT_EQ(stats.accelerator.running_ns, 10'000);
}

TEST_F(TrainingLoopTest, EpochsAndPauses) {
  auto source = std::make_unique<FakeSource>(clock_, [](std::uint64_t) { return 0; }, 1);
  TrainingLoop loop(std::move(source), {.compute_ns = 1000, .skipped_steps = 2}, clock_);
  for (int epoch = 0; epoch < 3; ++epoch) {
    loop.begin_epoch();
    const auto done = loop.advance(10, kLong);
    ASSERT_TRUE(done && *done);
    loop.pause();
    clock_.advance_to(clock_.now() + 1'000'000);
  }
  const TrainingStats stats = loop.stats();
  EXPECT_EQ(stats.accelerator.busy_ns, 30'000);
  EXPECT_EQ(stats.accelerator.running_ns, 30'000);
  ASSERT_EQ(stats.accelerator.epochs.size(), 3);
  for (const EpochTimes& epoch : stats.accelerator.epochs) {
    EXPECT_EQ(epoch.steps, 10);
    EXPECT_EQ(epoch.busy_ns, 8000);
    EXPECT_EQ(epoch.running_ns, 8000);
  }
}

TEST_F(TrainingLoopTest, RanksStartTogether) {
  BarrierMemory memory{};
  auto source = std::make_unique<FakeSource>(clock_, [](std::uint64_t) { return 0; }, 1);
  TrainingLoop loop(std::move(source), {.compute_ns = 1000}, clock_,
                    std::make_unique<SharedBarrier>(memory, 2));
  loop.begin_epoch();
  const std::int64_t start = clock_.now();
  SharedBarrier other(memory, 2);
  for (std::uint64_t step = 0; step < 4; ++step)
    ASSERT_TRUE(other.arrive(step, start + static_cast<std::int64_t>(step) * 1700, std::nullopt));  // slower
  const auto done = loop.advance(4, kLong);
  ASSERT_TRUE(done && *done);
  EXPECT_EQ(loop.stats().accelerator.running_ns, 3 * 1700 + 1000);
  SharedBarrier::abort(memory);
  loop.begin_epoch();
  const auto failed = loop.advance(5, kLong);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().kind, ErrorKind::cancelled);
}

TEST_F(TrainingLoopTest, NullSourceHasTheBatchesOfTheOrder) {
  const records::OrderOptions order{
      .samples = 100, .batch_size = 8, .ranks = 2, .rank = 1, .seed = 3, .drop_last = true};
  NullSource source(order);
  const records::SampleOrder expected(order);
  records::OrderCursor cursor;
  for (int step = 0; step < 20; ++step) {  // 6 in an epoch
    const records::Step each = expected.step(expected.normalized(cursor));
    cursor = each.end;
    const auto batch = source.next({});
    ASSERT_TRUE(batch);
    EXPECT_EQ(batch->units, expected.samples_of(each));
  }
}

}  // namespace
}  // namespace trunkline::workload
