#include "mem/fresh_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

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
  // In pieces, like blocks of a file, each at a different offset within a huge page.
  for (std::uint64_t at = 0; at < bytes; at += 3 * kMiB + 4096)
    populate_pages(buffer->data() + at, std::min<std::uint64_t>(3 * kMiB + 4096, bytes - at));
  std::vector<unsigned char> present(bytes / 4096);
  ASSERT_EQ(::mincore(buffer->data(), bytes, present.data()), 0);
  for (const unsigned char page : present) ASSERT_EQ(page & 1, 1);
  for (std::uint64_t at = 0; at < bytes; at += 4096)
    ASSERT_EQ(buffer->data()[at], at == 5 * kMiB ? std::byte{7} : std::byte{0}) << at;
}

}  // namespace
}  // namespace trunkline
