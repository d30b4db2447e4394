// Ranks that meet by a collective operation, with a stand-in for it.
#include "workload/collective_barrier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace trunkline::workload {
namespace {

// Time passes only in sleeps.
class FakeClock final : public Clock {
 public:
  std::int64_t now() override { return now_; }
  void sleep_until(std::int64_t deadline) override {
    sleeps.push_back(deadline - now_);
    now_ = std::max(now_, deadline);
  }

  std::vector<std::int64_t> sleeps;

 private:
  std::int64_t now_ = 1'000'000;
};

// One other rank, which arrives at a time of the clock.
class FakeReduction final : public MaxReduction {
 public:
  explicit FakeReduction(FakeClock& clock) : clock_(clock) {}

  Result<void> begin(std::int64_t value) override {
    if (fails) return std::unexpected(make_error(ErrorKind::cancelled, "another rank has ended"));
    own = value;
    return {};
  }
  Result<std::optional<std::int64_t>> poll() override {
    if (fails) return std::unexpected(make_error(ErrorKind::cancelled, "another rank has ended"));
    if (clock_.now() < arrives) return std::nullopt;
    return std::max(own, other);
  }

  std::int64_t own = -1;
  std::int64_t other = 0;
  std::int64_t arrives = 0;
  bool fails = false;

 private:
  FakeClock& clock_;
};

class CollectiveBarrierTest : public testing::Test {
 protected:
  FakeClock clock_;
  FakeReduction reduction_{clock_};
  CollectiveBarrier barrier_{reduction_, clock_};
};

TEST_F(CollectiveBarrierTest, AStepStartsAtTheEndOfTheLastIfAllAreInTime) {
  ASSERT_TRUE(barrier_.arrive(1, 1'000'000, 1'500'000));
  EXPECT_EQ(reduction_.own, 0);
  const auto time = barrier_.wait(1, 2'000'000);
  ASSERT_TRUE(time);
  EXPECT_EQ(*time, 1'500'000);
}

TEST_F(CollectiveBarrierTest, AllStartAsLateAsTheLatestRank) {
  reduction_.other = 700;
  reduction_.arrives = 1'000'600;
  ASSERT_TRUE(barrier_.arrive(1, 1'000'000, 999'900));
  EXPECT_EQ(reduction_.own, 100);
  auto time = barrier_.wait(1, 2'000'000);
  ASSERT_TRUE(time);
  EXPECT_EQ(*time, 999'900 + 700);

  const std::int64_t now = clock_.now();
  ASSERT_TRUE(barrier_.arrive(2, now, now - 900));
  time = barrier_.wait(2, 2'000'000);
  ASSERT_TRUE(time);
  EXPECT_EQ(*time, now);
}

TEST_F(CollectiveBarrierTest, ARankThatIsBehindTheOthersDoesNotStartLaterThanTheyHaveArrived) {
  reduction_.other = 50'000;  // by the other rank's clock, whose step before ended earlier
  ASSERT_TRUE(barrier_.arrive(1, 1'000'000, 999'900));
  const auto time = barrier_.wait(1, 2'000'000);
  ASSERT_TRUE(time);
  EXPECT_EQ(*time, clock_.now());
}

TEST_F(CollectiveBarrierTest, WithoutAStepBeforeAllStartWhenTheLastHasArrived) {
  reduction_.arrives = 3'000'000;
  ASSERT_TRUE(barrier_.arrive(0, 1'000'000, std::nullopt));
  EXPECT_EQ(reduction_.own, 0);
  const auto time = barrier_.wait(0, 9'000'000);
  ASSERT_TRUE(time);
  ASSERT_TRUE(*time);
  EXPECT_EQ(**time, clock_.now());
  EXPECT_GE(**time, 3'000'000);
  EXPECT_LE(**time, 3'050'000);
}

TEST_F(CollectiveBarrierTest, WaitsNoLongerThanItMay) {
  reduction_.arrives = 3'000'000;
  ASSERT_TRUE(barrier_.arrive(1, 1'000'000, 1'000'000));
  const auto time = barrier_.wait(1, 1'030'000);
  ASSERT_TRUE(time);
  EXPECT_FALSE(*time);
  EXPECT_EQ(clock_.now(), 1'030'000);
}

TEST_F(CollectiveBarrierTest, LongWaitsPollRarely) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  reduction_.arrives = 10 * kSecond;
  ASSERT_TRUE(barrier_.arrive(1, 1'000'000, 1'000'000));
  const auto time = barrier_.wait(1, 20 * kSecond);
  ASSERT_TRUE(time);
  EXPECT_TRUE(*time);
  EXPECT_LT(clock_.sleeps.size(), 10'500);
  EXPECT_GE(std::ranges::min(clock_.sleeps), 20'000);
}

TEST_F(CollectiveBarrierTest, ErrorsOfTheCollectiveEndTheWait) {
  ASSERT_TRUE(barrier_.arrive(1, 1'000'000, std::nullopt));
  reduction_.fails = true;
  const auto time = barrier_.wait(1, 2'000'000);
  ASSERT_FALSE(time);
  EXPECT_EQ(time.error().kind, ErrorKind::cancelled);
  EXPECT_FALSE(barrier_.arrive(2, 1'000'000, std::nullopt));
}

}  // namespace
}  // namespace trunkline::workload
