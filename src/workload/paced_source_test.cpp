// Batches of an imagined device, on a clock that is under control.
#include "workload/paced_source.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "workload/training_loop.h"

namespace trunkline::workload {
namespace {

constexpr std::int64_t kLongWait = std::numeric_limits<std::int64_t>::max() / 4;
constexpr records::OrderOptions kOrder{.samples = 1000, .batch_size = 4, .seed = 3, .drop_last = true};

class SleptClock final : public Clock {
 public:
  std::int64_t now() override { return now_; }
  void sleep_until(std::int64_t deadline) override { now_ = std::max(now_, deadline); }

 private:
  std::int64_t now_ = 1'000;
};

TEST(PacedSource, BatchesArriveAtTheSpeedOfTheDevice) {
  SleptClock clock;
  // Four units of 50 bytes are 100 ns at 2 bytes in a nanosecond.
  PacedSource source(kOrder, {.bytes_per_ns = 2, .unit_bytes = 50, .slots = 3}, clock);
  NullSource expected(kOrder);
  std::vector<std::shared_ptr<const void>> held;
  for (int number = 1; number <= 3; ++number) {
    auto batch = source.next(std::chrono::nanoseconds(kLongWait));
    ASSERT_TRUE(batch);
    EXPECT_EQ(clock.now(), 1'000 + number * 100);
    EXPECT_EQ(batch->bytes, 200);
    EXPECT_EQ(batch->units, expected.next({})->units);
    held.push_back(std::move(batch->memory));
  }
  // All buffers are in use: nothing is read.
  const auto late = source.next(std::chrono::nanoseconds(500));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().kind, ErrorKind::timed_out);
  EXPECT_EQ(clock.now(), 1'800);
  held.erase(held.begin());
  ASSERT_FALSE(source.next(std::chrono::nanoseconds(40)));  // begun at 1800, and not there yet
  ASSERT_TRUE(source.next(std::chrono::nanoseconds(kLongWait)));
  EXPECT_EQ(clock.now(), 1'900);
}

TEST(PacedSource, ReadsAheadIntoFreeBuffers) {
  SleptClock clock;
  PacedSource source(kOrder, {.bytes_per_ns = 1, .unit_bytes = 25, .slots = 3}, clock);
  clock.sleep_until(11'000);
  for (int number = 0; number < 3; ++number) {
    const auto batch = source.next({});  // there already; released at once
    ASSERT_TRUE(batch);
  }
  EXPECT_EQ(clock.now(), 11'000);
  EXPECT_FALSE(source.next({}));  // its buffer was in use until now
}

TEST(PacedSource, MemoryMayOutliveTheSource) {
  SleptClock clock;
  auto source = std::make_unique<PacedSource>(kOrder, PacedDevice{}, clock);
  auto batch = source->next(std::chrono::nanoseconds(kLongWait));
  ASSERT_TRUE(batch);
  source.reset();
  batch->memory.reset();
}

// Utilization = min(1, time of computation / time of reading), as a plan computes it.
TEST(PacedSource, TheUtilizationFollowsFromTheSpeed) {
  for (const double bytes_per_ns : {0.5, 0.9, 1.0, 2.0}) {
    SleptClock clock;
    auto source = std::make_unique<PacedSource>(
        kOrder, PacedDevice{.bytes_per_ns = bytes_per_ns, .unit_bytes = 250, .slots = 3}, clock);
    TrainingLoop loop(std::move(source), {.batch_size = 4, .compute_ns = 1000}, clock);
    loop.begin_epoch();
    const auto done = loop.advance(200, kLongWait);
    ASSERT_TRUE(done && *done);
    const AcceleratorStats stats = loop.stats().accelerator;
    const auto busy = static_cast<double>(stats.busy_ns - stats.first_busy_ns);
    const auto running = static_cast<double>(stats.running_ns - stats.first_running_ns);
    EXPECT_NEAR(busy / running, std::min(1.0, bytes_per_ns), 0.005) << bytes_per_ns;
    EXPECT_EQ(loop.stats().bytes, 200'000);
  }
}

}  // namespace
}  // namespace trunkline::workload
