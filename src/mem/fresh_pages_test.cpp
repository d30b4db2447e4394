#include "mem/fresh_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <random>
#include <vector>

#include "trunkline/buffer.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

TEST(FreshPages, AllAreResidentAndKeepTheirBytes) {
  const std::uint64_t bytes = 80 * kMiB + 4096;
  auto buffer = Buffer::allocate_pageable(bytes);
  ASSERT_TRUE(buffer);
  buffer->data()[5 * kMiB] = std::byte{7};
  FreshMapping mapping{.data = buffer->data(), .bytes = bytes};
  // In pieces, like blocks of a file, each at a different offset within a huge page and within a page.
  constexpr std::uint64_t kPiece = 3 * kMiB + 512;
  for (std::uint64_t at = 0; at < bytes; at += kPiece)
    populate_pages(buffer->data() + at, std::min(kPiece, bytes - at), mapping);
  std::vector<unsigned char> present(bytes / 4096);
  ASSERT_EQ(::mincore(buffer->data(), bytes, present.data()), 0);
  for (const unsigned char page : present) ASSERT_EQ(page & 1, 1);
  for (std::uint64_t at = 0; at < bytes; at += 4096)
    ASSERT_EQ(buffer->data()[at], at == 5 * kMiB ? std::byte{7} : std::byte{0}) << at;
}

TEST(FreshPages, PiecesMayBePopulatedInAnyOrder) {
  const std::uint64_t bytes = 21 * kMiB + 100;
  auto buffer = Buffer::allocate_pageable(bytes);
  ASSERT_TRUE(buffer);
  FreshMapping mapping{.data = buffer->data(), .bytes = bytes};
  constexpr std::uint64_t kPiece = kMiB;
  std::vector<std::uint64_t> pieces;
  for (std::uint64_t at = 0; at < bytes; at += kPiece) pieces.push_back(at);
  std::ranges::shuffle(pieces, std::mt19937_64(1));
  for (const std::uint64_t at : pieces)
    populate_pages(buffer->data() + at, std::min(kPiece, bytes - at), mapping);
  std::vector<unsigned char> present((bytes + 4095) / 4096);
  ASSERT_EQ(::mincore(buffer->data(), bytes, present.data()), 0);
  for (const unsigned char page : present) ASSERT_EQ(page & 1, 1);
}

// How many huge pages in a row are replaced by small ones, from here on.
int small_in_a_row(PageSizePolicy& policy) {
  int count = 0;
  while (policy.next_small() > 0) ++count;
  return count;
}

TEST(PageSizePolicy, CheapHugePagesAreAllThereAre) {
  PageSizePolicy policy;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(policy.next_small(), 0);
    policy.add_price(PageSizePolicy::kExpensiveNs);
  }
}

TEST(PageSizePolicy, EachExpensiveTrialPutsTheNextOffForLonger) {
  PageSizePolicy policy;
  std::vector<int> stretches;
  for (int trial = 0; trial < 7; ++trial) {
    policy.add_price(PageSizePolicy::kExpensiveNs + 1);
    stretches.push_back(small_in_a_row(policy));
  }
  EXPECT_EQ(stretches, (std::vector{16, 32, 64, 128, 256, 256, 256}));
}

TEST(PageSizePolicy, ACheapTrialForgetsTheExpensiveOnes) {
  PageSizePolicy policy;
  for (int trial = 0; trial < 3; ++trial) {
    policy.add_price(PageSizePolicy::kExpensiveNs + 1);
    small_in_a_row(policy);
  }
  policy.add_price(1);
  EXPECT_EQ(small_in_a_row(policy), 0);
  policy.add_price(PageSizePolicy::kExpensiveNs + 1);
  EXPECT_EQ(small_in_a_row(policy), PageSizePolicy::kLeastSmall);
}

}  // namespace
}  // namespace trunkline
