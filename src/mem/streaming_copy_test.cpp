#include "mem/streaming_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "support/test_memory.h"

namespace trunkline {
namespace {

TEST(StreamingCopy, CopiesEveryByteAndNoOther) {
  constexpr std::size_t kRoom = 600'000;
  std::vector<std::byte> source(kRoom);
  test::fill_random(source, 3);
  for (const std::size_t bytes :
       {0UL, 1UL, 31UL, 4096UL, 256UL * 1024, 256UL * 1024 + 1, 400'127UL, 524'288UL}) {
    for (const std::size_t target_at : {0UL, 1UL, 16UL, 31UL, 32UL, 64UL}) {
      for (const std::size_t source_at : {0UL, 7UL, 32UL}) {
        std::vector<std::byte> target(kRoom, std::byte{0xEE});
        streaming_copy(target.data() + target_at, source.data() + source_at, bytes);
        ASSERT_EQ(std::memcmp(target.data() + target_at, source.data() + source_at, bytes), 0) << bytes;
        for (std::size_t before = 0; before < target_at; ++before) ASSERT_EQ(target[before], std::byte{0xEE});
        for (std::size_t after = target_at + bytes; after < std::min(kRoom, target_at + bytes + 200); ++after)
          ASSERT_EQ(target[after], std::byte{0xEE}) << bytes << " at " << target_at;
      }
    }
  }
}

}  // namespace
}  // namespace trunkline
