#include "mem/slot_pool.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "mem/pinned_budget.h"

namespace trunkline {
namespace {

TEST(SlotPool, LeasesEachSlotOnceAndReusesIt) {
  const auto pool = SlotPool::allocate(4096, 5, nullptr);
  ASSERT_EQ(pool->slots(), 5U);
  std::vector<SlotPool::Lease> leases;
  std::set<std::byte*> places;
  for (int index = 0; index < 5; ++index) {
    leases.push_back(pool->try_lease());
    ASSERT_TRUE(leases.back().valid());
    places.insert(leases.back().data());
  }
  EXPECT_EQ(places.size(), 5U);
  for (std::byte* place : places) EXPECT_EQ((place - pool->arena().data()) % 4096, 0);
  EXPECT_FALSE(pool->try_lease().valid());
  std::byte* freed = leases[2].data();
  leases[2] = {};
  const auto again = pool->try_lease();
  ASSERT_TRUE(again.valid());
  EXPECT_EQ(again.data(), freed);
}

TEST(SlotPool, AllocatesAsManySlotsAsTheBudgetAllows) {
  const auto budget = std::make_shared<PinnedBudget>(5 * 4096);
  const auto pool = SlotPool::allocate(4096, 16, budget);
  EXPECT_EQ(pool->slots(), 4U);  // halved until it fits
  EXPECT_EQ(budget->used_bytes(), 4U * 4096);
  EXPECT_EQ(SlotPool::allocate(8192, 1, budget)->slots(), 0U);
}

TEST(PinnedBudget, IsNeverExceeded) {
  PinnedBudget budget(100);
  EXPECT_TRUE(budget.try_take(60));
  EXPECT_FALSE(budget.try_take(41));
  EXPECT_FALSE(budget.try_take(~std::uint64_t{0}));
  EXPECT_TRUE(budget.try_take(40));
  EXPECT_EQ(budget.peak_bytes(), 100U);
  budget.give_back(100);
  EXPECT_EQ(budget.used_bytes(), 0U);
}

}  // namespace
}  // namespace trunkline
