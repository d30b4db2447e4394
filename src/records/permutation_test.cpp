#include "records/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace trunkline::records {
namespace {

std::vector<std::uint64_t> order_of(std::uint64_t count, std::uint64_t key) {
  const Permutation permutation(count, key);
  std::vector<std::uint64_t> order(count);
  for (std::uint64_t position = 0; position < count; ++position) order[position] = permutation(position);
  return order;
}

TEST(Permutation, HoldsEveryNumberOnce) {
  for (const std::uint64_t count : {1, 2, 3, 4, 5, 7, 8, 9, 100, 255, 256, 257, 1000, 4097, 65536, 100'003}) {
    for (const std::uint64_t key : {0, 1, 77}) {
      auto order = order_of(count, key);
      std::ranges::sort(order);
      for (std::uint64_t value = 0; value < count; ++value) ASSERT_EQ(order[value], value) << count;
    }
  }
}

TEST(Permutation, KeysGiveDifferentOrders) {
  EXPECT_NE(order_of(100, 1), order_of(100, 2));
  EXPECT_NE(order_of(100, 0), order_of(100, 1));
  std::vector<std::uint64_t> sorted(1000);
  std::iota(sorted.begin(), sorted.end(), 0);
  EXPECT_NE(order_of(1000, 0), sorted);
}

TEST(Permutation, LargeCountsStayInRange) {
  const std::uint64_t count = 10'000'000'000;
  const Permutation permutation(count, 5);
  std::vector<std::uint64_t> values;
  for (std::uint64_t position = count - 100'000; position < count; ++position) {
    values.push_back(permutation(position));
    ASSERT_LT(values.back(), count);
  }
  std::ranges::sort(values);
  EXPECT_EQ(std::ranges::adjacent_find(values), values.end());
}

// What a saved state continues depends on these numbers.
TEST(Permutation, NeverChanges) {
  EXPECT_EQ(mix_key(1, 2), 834844254806117752U);
  EXPECT_EQ(order_of(10, 42), (std::vector<std::uint64_t>{7, 0, 3, 9, 5, 2, 8, 6, 1, 4}));
  EXPECT_EQ(Permutation(1'000'000'007, 7)(123'456'789), 748269599U);
}

// Each value at each position is equally probable: chi-squared over many keys, of 12 numbers. With 121
// degrees of freedom, 220 is exceeded with a probability below 1e-7.
TEST(Permutation, EveryPlaceIsEquallyProbable) {
  constexpr std::uint64_t kCount = 12;
  constexpr std::uint64_t kKeys = 60'000;
  std::vector<std::uint64_t> seen(kCount * kCount);
  for (std::uint64_t key = 0; key < kKeys; ++key) {
    const Permutation permutation(kCount, mix_key(3, key));
    for (std::uint64_t position = 0; position < kCount; ++position)
      ++seen[position * kCount + permutation(position)];
  }
  const double expected = static_cast<double>(kKeys) / kCount;
  double squared = 0;
  for (const std::uint64_t count : seen)
    squared += std::pow(static_cast<double>(count) - expected, 2) / expected;
  EXPECT_LT(squared, 220);
}

// Neighbours in the order are far apart in the data: in a random order, a third of the data on average.
TEST(Permutation, NeighboursAreFarApart) {
  constexpr std::uint64_t kCount = 100'000;
  const auto order = order_of(kCount, 9);
  double distance = 0;
  for (std::uint64_t position = 1; position < kCount; ++position)
    distance += std::abs(static_cast<double>(order[position]) - static_cast<double>(order[position - 1]));
  EXPECT_NEAR(distance / kCount / kCount, 1.0 / 3, 0.01);
}

}  // namespace
}  // namespace trunkline::records
