#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "trunkline/stream.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

std::size_t residents(const StreamPlacement& placement) {
  return static_cast<std::size_t>(std::ranges::count(placement.resident, true));
}

TEST(Placement, AllStayWhereAllFit) {
  const std::vector<std::uint64_t> units = {10 * kMiB, 5000, 20 * kMiB};
  const auto placed = place_units(units, 30 * kMiB + 8192);
  ASSERT_TRUE(placed);
  EXPECT_EQ(residents(*placed), 3U);
  EXPECT_EQ(placed->slots, 0U);
  EXPECT_EQ(placed->memory_bytes, 30 * kMiB + 8192);
}

TEST(Placement, TheMinimumIsTwoSlots) {
  const std::vector<std::uint64_t> units(8, 10 * kMiB);
  const auto refused = place_units(units, 20 * kMiB - 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::out_of_budget);
  EXPECT_NE(refused.error().message.find("pass at least 20971520 bytes"), std::string::npos)
      << refused.error().message;
  const auto placed = place_units(units, 20 * kMiB, 3);
  ASSERT_TRUE(placed);
  EXPECT_EQ(placed->slots, 2U);
  EXPECT_EQ(residents(*placed), 0U);
}

TEST(Placement, HalfOfTheMemoryKeepsEverySecondUnit) {
  const std::vector<std::uint64_t> units(40, kMiB);
  const auto placed = place_units(units, 22 * kMiB);
  ASSERT_TRUE(placed);
  EXPECT_EQ(residents(*placed), 20U);
  for (std::size_t unit = 0; unit + 1 < units.size(); ++unit)
    EXPECT_NE(placed->resident[unit], placed->resident[unit + 1]) << unit;
}

// For any sizes: the limit holds, little of the room is left unused, and no stretch of the cycle streams much
// more than its share.
TEST(Placement, EveryPlacementIsValid) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::uint64_t> units(1 + random() % 60);
    for (std::uint64_t& unit : units) unit = 1 + random() % (random() % 4 == 0 ? 8 * kMiB : 2 * kMiB);
    const std::uint64_t total = std::accumulate(units.begin(), units.end(), std::uint64_t{0});
    const std::uint64_t memory = random() % (total + total / 4);
    const std::size_t slots = 2 + random() % 3;
    const auto placed = place_units(units, memory, slots);
    if (!placed) {
      ASSERT_LT(memory, 2 * (std::ranges::max(units) + 4096));
      continue;
    }
    ASSERT_LE(placed->memory_bytes, memory);
    ASSERT_EQ(placed->resident.size(), units.size());
    std::uint64_t largest = 0;
    std::uint64_t smallest = std::numeric_limits<std::uint64_t>::max();
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      if (placed->resident[unit]) continue;
      largest = std::max(largest, units[unit]);
      smallest = std::min(smallest, units[unit]);
    }
    if (residents(*placed) == units.size()) {
      ASSERT_EQ(placed->slots, 0U);
      continue;
    }
    ASSERT_GE(placed->slots, 2U);
    ASSERT_LE(placed->slots, slots);
    ASSERT_GE(placed->slot_bytes, largest);
    // The rest has no room for another unit, in addition to slots as large as the largest of all units.
    const std::uint64_t slack = placed->slots * (std::ranges::max(units) + 4096 - placed->slot_bytes);
    ASSERT_LT(memory - placed->memory_bytes, smallest + 4096 + slack);
  }
}

}  // namespace
}  // namespace trunkline
