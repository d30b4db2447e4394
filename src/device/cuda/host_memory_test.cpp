#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "mem/pinned_budget.h"
#include "support/gpu.h"

namespace trunkline {
namespace {

class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest() {
    test::gpu();
    fakeCudaReset();
  }
  ~HostMemoryTest() override { EXPECT_STREQ(fakeCudaComplaints(), ""); }

  std::span<std::byte> part(std::size_t offset, std::size_t bytes) {
    return std::span(memory_).subspan(offset, bytes);
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(65536);
};

TEST_F(HostMemoryTest, IsRegisteredUntilItsHoldersLetGo) {
  auto first = register_host_memory(part(0, 8192));
  ASSERT_TRUE(first) << first.error().message;
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  auto within = register_host_memory(part(4096, 4096), 1);
  ASSERT_TRUE(within);
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  auto beside = register_host_memory(part(8192, 1));
  ASSERT_TRUE(beside);
  EXPECT_EQ(fakeCudaLive("registrations"), 2U);
  beside->reset();
  first->reset();
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  within->reset();
  EXPECT_EQ(fakeCudaLive("registrations"), 0U);
}

TEST_F(HostMemoryTest, WhatTheDriverRefusesIsAnErrorAndHoldsNothing) {
  const auto first = register_host_memory(part(4096, 4096));
  ASSERT_TRUE(first);
  const auto overlapping = register_host_memory(part(0, 8192));
  ASSERT_FALSE(overlapping);
  EXPECT_EQ(overlapping.error().kind, ErrorKind::device);
  EXPECT_NE(overlapping.error().message.find("4096 of them are pinned already"), std::string::npos)
      << overlapping.error().message;
  for (const char* function : {"cuMemHostRegister_v2", "cuCtxPushCurrent_v2"}) {
    fakeCudaFail(function, 2, 0, 1);
    EXPECT_FALSE(register_host_memory(part(20000, 1))) << function;
    EXPECT_TRUE(register_host_memory(part(20000, 1))) << function;
  }
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  EXPECT_EQ(register_host_memory(part(0, 1), 7).error().kind, ErrorKind::unsupported);
  EXPECT_TRUE(register_host_memory({}));
}

TEST_F(HostMemoryTest, ManyThreadsShareOne) {
  std::vector<std::thread> threads;
  std::atomic<unsigned> refused{0};
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([&] {
      for (int round = 0; round < 500; ++round) {
        if (!register_host_memory(part(0, 4096))) ++refused;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 0U);
  EXPECT_EQ(fakeCudaLive("registrations"), 0U);
}

// Against counting by hand: ranges that were registered anew, and how many hold each.
TEST_F(HostMemoryTest, TheBudgetCountsWhatIsRegistered) {
  constexpr std::size_t kUnit = 1000;
  struct Range {
    std::size_t begin;
    std::size_t end;
    unsigned holders;
  };
  const auto budget = std::make_shared<PinnedBudget>(40 * kUnit);
  unsigned shared = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    std::map<std::size_t, Range> ranges;                                    // the model
    std::vector<std::pair<std::size_t, std::shared_ptr<const void>>> held;  // begin of its range, pin
    const auto let_go = [&](std::size_t which) {
      Range& range = ranges.at(held[which].first);
      held[which].second.reset();
      if (--range.holders == 0) ranges.erase(held[which].first);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    };
    for (int step = 0; step < 300; ++step) {
      std::size_t total = 0;
      for (const auto& [begin, range] : ranges) total += range.end - range.begin;
      if (!held.empty() && random() % 2 == 0) {
        let_go(random() % held.size());
      } else {
        const std::size_t begin = random() % 60 * kUnit;
        const std::size_t end = begin + (1 + random() % 12) * kUnit / (1 + random() % 3);
        const Range* covering = nullptr;
        bool overlapping = false;
        for (const auto& [from, range] : ranges) {
          if (range.begin <= begin && end <= range.end) covering = &range;
          overlapping = overlapping || (begin < range.end && range.begin < end);
        }
        if (end > memory_.size()) continue;
        auto pinned = register_host_memory(part(begin, end - begin), std::nullopt, budget);
        if (covering != nullptr) {
          ASSERT_TRUE(pinned) << pinned.error().message;
          ++ranges.at(covering->begin).holders;
          held.emplace_back(covering->begin, *pinned);
          ++shared;
        } else if (total + (end - begin) > budget->limit_bytes()) {
          ASSERT_FALSE(pinned);
          ASSERT_EQ(pinned.error().kind, ErrorKind::out_of_budget);
        } else if (overlapping) {
          ASSERT_FALSE(pinned);
          ASSERT_EQ(pinned.error().kind, ErrorKind::device) << pinned.error().message;
        } else {
          ASSERT_TRUE(pinned) << pinned.error().message;
          ranges[begin] = {.begin = begin, .end = end, .holders = 1};
          held.emplace_back(begin, *pinned);
        }
      }
      total = 0;
      for (const auto& [begin, range] : ranges) total += range.end - range.begin;
      ASSERT_EQ(budget->used_bytes(), total) << "seed " << seed << " step " << step;
      ASSERT_EQ(fakeCudaLive("registrations"), ranges.size());
    }
    while (!held.empty()) let_go(held.size() - 1);
    EXPECT_EQ(budget->used_bytes(), 0U);
    EXPECT_EQ(fakeCudaLive("registrations"), 0U);
  }
  EXPECT_GT(shared, 50U);
}

TEST_F(HostMemoryTest, TheDeviceInUseIsTheFirstWithAContext) {
  ASSERT_TRUE(cuda_device_in_use());  // by the fixture
  EXPECT_EQ(*cuda_device_in_use(), 0U);
  fakeCudaFail("cuDevicePrimaryCtxGetState", 1, 0, 1);
  EXPECT_NE(cuda_device_in_use(), 0U);
}

}  // namespace
}  // namespace trunkline
