// Ranks of one machine that meet before each step.
#include "workload/shared_barrier.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "os/precise_sleep.h"

namespace trunkline::workload {
namespace {

constexpr std::int64_t kMinute = 60'000'000'000;

TEST(SharedBarrier, AllRanksStartAtTheLatestTime) {
  constexpr std::uint32_t kRanks = 4;
  constexpr std::uint64_t kSteps = 2000;
  BarrierMemory memory{};
  // Times of a rank grow from step to step, as they do in a training.
  const auto time_of = [](std::uint64_t step, std::uint32_t rank) {
    return static_cast<std::int64_t>(step * 1000 + (step * 7 + rank * 13) % 100);
  };
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      SharedBarrier barrier(memory, kRanks);
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        if (!barrier.arrive(step, time_of(step, rank), std::nullopt)) ++wrong;
        const auto time = barrier.wait(step, os::monotonic_ns() + kMinute);
        std::int64_t expected = 0;
        for (std::uint32_t each = 0; each < kRanks; ++each)
          expected = std::max(expected, time_of(step, each));
        if (!time || *time != expected) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(SharedBarrier, WaitsNoLongerThanItMay) {
  BarrierMemory memory{};
  SharedBarrier barrier(memory, 2);
  ASSERT_TRUE(barrier.arrive(0, 5, std::nullopt));
  auto time = barrier.wait(0, os::monotonic_ns() + 1000);
  ASSERT_TRUE(time);
  EXPECT_FALSE(*time);
  ASSERT_TRUE(SharedBarrier(memory, 2).arrive(0, 2, 3));
  time = barrier.wait(0, 0);
  ASSERT_TRUE(time);
  EXPECT_EQ(*time, 5);
}

TEST(SharedBarrier, AnAbortEndsWaits) {
  BarrierMemory memory{};
  SharedBarrier barrier(memory, 2);
  ASSERT_TRUE(barrier.arrive(0, 5, std::nullopt));
  std::thread other([&] { SharedBarrier::abort(memory); });
  const auto time = barrier.wait(0, os::monotonic_ns() + kMinute);
  other.join();
  ASSERT_FALSE(time);
  EXPECT_EQ(time.error().kind, ErrorKind::cancelled);
}

}  // namespace
}  // namespace trunkline::workload
