#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "trunkline/unit_cache.h"

namespace trunkline {
namespace {

constexpr std::uint64_t kPage = 4096;

TEST(PlacePools, GivesEachPoolTheSameShareOfItsUnits) {
  std::vector<std::uint64_t> bytes;
  std::vector<std::size_t> pools;
  for (int expert = 0; expert < 8; ++expert) {
    bytes.insert(bytes.end(), {2 * kPage, kPage});
    pools.insert(pools.end(), {0, 1});
  }
  const auto half = place_pools(bytes, pools, 12 * kPage);
  ASSERT_TRUE(half);
  EXPECT_EQ(half->slots, (std::vector<std::size_t>{4, 4}));
  EXPECT_EQ(half->slot_bytes, (std::vector<std::uint64_t>{2 * kPage, kPage}));
  EXPECT_EQ(half->memory_bytes, 12 * kPage);
  const auto all = place_pools(bytes, pools, 1'000'000'000);
  ASSERT_TRUE(all);
  EXPECT_EQ(all->slots, (std::vector<std::size_t>{8, 8}));
}

TEST(PlacePools, TheLeastIsNamed) {
  const std::vector<std::uint64_t> bytes{kPage + 1, 1, 1, 1};
  const std::vector<std::size_t> pools{0, 0, 0, 1};
  const auto missing = place_pools(bytes, pools, 5 * kPage - 1);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().kind, ErrorKind::out_of_budget);
  EXPECT_NE(missing.error().message.find("pass at least 20480 bytes"), std::string::npos)
      << missing.error().message;
  const auto least = place_pools(bytes, pools, 5 * kPage);
  ASSERT_TRUE(least);
  EXPECT_EQ(least->slots, (std::vector<std::size_t>{2, 1}));
}

TEST(PlacePools, NeverExceedsTheMemory) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::uint64_t> bytes;
    std::vector<std::size_t> pools;
    for (std::size_t pool = 0; pool < 1 + random() % 4; ++pool) {
      const std::uint64_t of_pool = 1 + random() % 50'000;
      for (std::size_t unit = 0; unit < 1 + random() % 30; ++unit) {
        bytes.push_back(1 + random() % of_pool);
        pools.push_back(pool);
      }
    }
    const std::uint64_t memory = random() % 2'000'000;
    const auto placed = place_pools(bytes, pools, memory);
    if (!placed) continue;
    std::uint64_t used = 0;
    for (std::size_t pool = 0; pool < placed->slots.size(); ++pool) {
      const auto units = static_cast<std::size_t>(std::ranges::count(pools, pool));
      EXPECT_GE(placed->slots[pool], std::min<std::size_t>(2, units));
      EXPECT_LE(placed->slots[pool], units);
      used += placed->slots[pool] * placed->slot_bytes[pool];
      if (placed->slots[pool] < units) {
        EXPECT_GT(placed->memory_bytes + placed->slot_bytes[pool], memory);
      }
    }
    EXPECT_EQ(used, placed->memory_bytes);
    EXPECT_LE(used, memory);
  }
}

}  // namespace
}  // namespace trunkline
