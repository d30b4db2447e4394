#include "tensor_file/fresh_targets.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "trunkline/buffer.h"
#include "trunkline/units.h"

namespace trunkline::tensor_file {
namespace {

bool is_resident(const std::byte* page) {
  unsigned char present = 0;
  EXPECT_EQ(::mincore(const_cast<std::byte*>(page), 4096, &present), 0);  // NOLINT(*-const-cast)
  return (present & 1) != 0;
}

class FreshTargetsTest : public ::testing::Test {
 protected:
  // Two tensors of 6 MiB, the second of which is new, in blocks of 4 MiB.
  FreshTargetsTest() {
    for (int tensor = 0; tensor < 2; ++tensor) {
      memory_.push_back(Buffer::allocate_pageable(6 * kMiB).value());
      layout_.extents.push_back({.offset = tensor * 6 * kMiB,
                                 .memory = {memory_.back().data(), memory_.back().size()},
                                 .fresh = tensor == 1});
    }
    layout_.bytes = 12 * kMiB;
    for (std::uint64_t at = 0; at < layout_.bytes; at += 4 * kMiB)
      targets_.add_block(layout_, {.offset = at, .bytes = 4 * kMiB});
  }

  std::byte* of_second(std::uint64_t offset) { return memory_[1].data() + offset; }

  std::vector<Buffer> memory_;
  FileLayout layout_;
  FreshTargets targets_;
};

TEST_F(FreshTargetsTest, OnlyNewMemoryHasToBeMadeReady) {
  EXPECT_TRUE(targets_.is_ready(0));
  EXPECT_FALSE(targets_.is_ready(1));
  EXPECT_FALSE(targets_.is_ready(2));
  EXPECT_EQ(targets_.first_unclaimed(), 1U);
}

TEST_F(FreshTargetsTest, EachBlockIsClaimedOnce) {
  EXPECT_TRUE(targets_.claim(2));
  EXPECT_FALSE(targets_.claim(2));
  EXPECT_FALSE(targets_.is_ready(2));
  EXPECT_EQ(targets_.first_unclaimed(), 1U);
  EXPECT_TRUE(targets_.claim(1));
  EXPECT_EQ(targets_.first_unclaimed(), targets_.end());
  EXPECT_FALSE(targets_.claim(0));
  targets_.set_ready(2);
  EXPECT_TRUE(targets_.is_ready(2));
}

#ifdef MADV_POPULATE_WRITE
TEST_F(FreshTargetsTest, TheMemoryOfItsBlocksBecomesResident) {
  EXPECT_FALSE(is_resident(of_second(0)));
  targets_.populate(1);  // its first 2 MiB, and whatever huge page they begin
  EXPECT_TRUE(is_resident(of_second(0)));
  EXPECT_TRUE(is_resident(of_second(2 * kMiB - 4096)));
  EXPECT_FALSE(is_resident(of_second(4 * kMiB)));
  targets_.populate(2);
  for (std::uint64_t at = 0; at < 6 * kMiB; at += 4096) ASSERT_TRUE(is_resident(of_second(at))) << at;
  EXPECT_FALSE(is_resident(memory_[0].data()));
}
#endif

}  // namespace
}  // namespace trunkline::tensor_file
