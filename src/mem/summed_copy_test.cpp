#include "mem/summed_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "support/test_memory.h"
#include "trunkline/checksum.h"

namespace trunkline {
namespace {

// Uses lengths around those at which the implementation changes, and every alignment of source and target.
TEST(SummedCopy, CopiesEveryByteAndNoOtherAndReturnsTheChecksum) {
  constexpr std::size_t kRoom = 700'000;
  std::vector<std::byte> source(kRoom);
  test::fill_random(source, 5);
  std::mt19937 random(11);
  for (const std::size_t bytes : {0UL, 1UL, 33UL, 4096UL, 262'143UL, 262'144UL, 262'145UL, 262'271UL,
                                  262'272UL, 400'127UL, 524'288UL, 650'000UL}) {
    for (const std::size_t target_at : {0UL, 1UL, 16UL, 31UL, 32UL, 33UL, 64UL}) {
      for (const std::size_t source_at : {0UL, 7UL, 32UL}) {
        const auto from = std::span<const std::byte>(source).subspan(source_at, bytes);
        const auto seed = static_cast<std::uint32_t>(random());
        for (const bool castagnoli : {true, false}) {
          std::vector<std::byte> target(kRoom, std::byte{0xEE});
          std::byte* to = target.data() + target_at;
          const std::uint32_t value =
              castagnoli ? copy_with_crc32c(to, from, seed) : copy_with_crc32(to, from, seed);
          ASSERT_EQ(value, castagnoli ? crc32c(from, seed) : crc32(from, seed))
              << bytes << " from " << source_at << " to " << target_at;
          ASSERT_EQ(std::memcmp(to, from.data(), bytes), 0) << bytes;
          ASSERT_EQ(std::count(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(target_at),
                               std::byte{0xEE}),
                    static_cast<std::ptrdiff_t>(target_at));
          ASSERT_TRUE(std::all_of(to + bytes, target.data() + kRoom,
                                  [](std::byte each) { return each == std::byte{0xEE}; }))
              << bytes << " to " << target_at;
        }
      }
    }
  }
}

}  // namespace
}  // namespace trunkline
