#include "tensor_file/block_plan.h"

#include <gtest/gtest.h>

#include "tensor_file/file_layout_fixture.h"

namespace trunkline::tensor_file {
namespace {

// Addresses only: nothing is read.
MemoryView at(std::uintptr_t address, std::uint64_t bytes) {
  return {reinterpret_cast<std::byte*>(address), bytes};  // NOLINT(performance-no-int-to-ptr)
}

FileLayout one_extent(std::uint64_t bytes, std::uint64_t offset, std::uintptr_t address) {
  return {
      .path = "f", .bytes = bytes, .extents = {{.offset = offset, .memory = at(address, bytes - offset)}}};
}

struct Shape {
  std::uint64_t offset;
  std::uint64_t bytes;
  bool direct;
  bool operator==(const Shape&) const = default;
};

std::vector<Shape> shapes(const FileLayout& layout, const BlockRules& rules) {
  std::vector<Shape> found;
  for (const Block& block : cut_into_blocks(layout, rules))
    found.push_back({block.offset, block.bytes, block.direct != nullptr});
  return found;
}

constexpr BlockRules kDirect{.block_bytes = 4 * kMiB, .allow_direct = true, .memory_alignment = 512};

TEST(BlockPlan, AlignedMemoryIsTransferredDirectly) {
  const FileLayout layout = one_extent(4096 + 10 * kMiB, 4096, 0x10000000);
  const std::vector<Shape> expected = {{0, 4096, false},
                                       {4096, 4 * kMiB, true},
                                       {4096 + 4 * kMiB, 4 * kMiB, true},
                                       {4096 + 8 * kMiB, 2 * kMiB, true}};
  EXPECT_EQ(shapes(layout, kDirect), expected);
}

TEST(BlockPlan, MisalignedMemoryAndDisallowedDirectAreStaged) {
  const std::vector<Shape> expected = {{0, 4 * kMiB, false}, {4 * kMiB, kMiB, false}};
  EXPECT_EQ(shapes(one_extent(5 * kMiB, 4096, 0x10000040), kDirect), expected);
  EXPECT_EQ(shapes(one_extent(5 * kMiB, 4096, 0x10000000), {.block_bytes = 4 * kMiB}), expected);
}

// What counts is the address of the file's first whole page.
TEST(BlockPlan, OffsetAndAddressMayBeMisalignedTogether) {
  const std::vector<Shape> expected = {
      {0, 4096, false}, {4096, 2 * kMiB, true}, {4096 + 2 * kMiB, 100, false}};
  EXPECT_EQ(shapes(one_extent(4096 + 2 * kMiB + 100, 96, 0x10000060), kDirect), expected);
}

TEST(BlockPlan, SmallExtentsAreCombined) {
  FileLayout layout{.path = "f", .bytes = kMiB, .extents = {}};
  for (std::uint64_t i = 0; i < 16; ++i)
    layout.extents.push_back({.offset = i * 65536, .memory = at(0x10000000 + i * 65536, 65536)});
  const std::vector<Shape> expected = {{0, kMiB, false}};
  EXPECT_EQ(shapes(layout, kDirect), expected);
}

TEST(BlockPlan, ExtentsWithChecksumFieldsAreStaged) {
  FileLayout layout = one_extent(2 * kMiB, 0, 0x10000000);
  layout.checksums.push_back({.begin = 0, .end = 10});
  layout.checksum_fields.push_back({.offset = kMiB});
  const std::vector<Shape> expected = {{0, 2 * kMiB, false}};
  EXPECT_EQ(shapes(layout, kDirect), expected);
}

TEST(BlockPlan, GapsAreSkippedOnlyIfRequested) {
  FileLayout layout{
      .path = "f", .bytes = 20 * kMiB, .extents = {{.offset = 10 * kMiB + 5, .memory = at(1, 10)}}};
  BlockRules rules{.block_bytes = 4 * kMiB, .skip_gaps = true};
  const std::vector<Shape> expected = {{10 * kMiB, 4096, false}};
  EXPECT_EQ(shapes(layout, rules), expected);
  layout.checksums = {{.begin = 0, .end = 1}, {.begin = 5 * kMiB, .end = 10 * kMiB}};
  const std::vector<Shape> with_checksums = {
      {0, 4096, false}, {5 * kMiB, 4 * kMiB, false}, {9 * kMiB, kMiB + 4096, false}};
  EXPECT_EQ(shapes(layout, rules), with_checksums);
  layout.extents.clear();
  layout.checksums = {{.begin = 20 * kMiB - 3, .end = 20 * kMiB - 2}};
  const std::vector<Shape> at_the_end = {{20 * kMiB - 4096, 4096, false}};
  EXPECT_EQ(shapes(layout, rules), at_the_end);
  rules.skip_gaps = false;
  EXPECT_EQ(shapes(layout, rules).size(), 5U);
}

TEST(BlockPlan, LargeGapsWithinABlockAreNotRead) {
  const BlockRules rules{.block_bytes = 4 * kMiB, .skip_gaps = true};
  FileLayout layout{.path = "f", .bytes = 20 * kMiB};
  // Gaps of 16 KiB, of the most that is read, of a byte more, and of 1 MiB.
  std::uint64_t offset = 0;
  for (const std::uint64_t gap : {16 * kKiB, kLargestReadGap, kLargestReadGap + 1, kMiB, kMiB}) {
    layout.extents.push_back({.offset = offset, .memory = at(1, 4096)});
    offset += 4096 + gap;
  }
  const std::uint64_t third = layout.extents[2].offset;
  const std::uint64_t fourth = layout.extents[3].offset;  // a byte behind a page
  const std::uint64_t fifth = layout.extents[4].offset;
  const std::vector<Shape> expected = {
      {0, third + 4096, false}, {fourth - 1, 8192, false}, {fifth - 1, 8192, false}};
  EXPECT_EQ(shapes(layout, rules), expected);
  // What a checksum covers is no gap.
  layout.checksums = {{.begin = 0, .end = fourth}};
  const std::vector<Shape> covered = {{0, fourth - 1 + 8192, false}, {fifth - 1, 8192, false}};
  EXPECT_EQ(shapes(layout, rules), covered);
}

TEST(BlockPlan, EmptyFileHasNoBlocks) { EXPECT_TRUE(shapes({.path = "f"}, kDirect).empty()); }

TEST(BlockPlan, BlocksCoverEverythingOnceAndSegmentsStayWithinOneOfEach) {
  std::mt19937_64 random(3);
  for (int round = 0; round < test::scaled(60); ++round) {
    const test::Sample sample = test::random_sample(random, random() % (20 * kMiB), "f");
    BlockRules rules = kDirect;
    rules.allow_direct = round % 2 == 0;
    std::uint64_t done = 0;
    for (const Block& block : cut_into_blocks(sample.layout, rules)) {
      ASSERT_EQ(block.offset, done);
      ASSERT_EQ(block.offset % kDirectGranularity, 0U);
      ASSERT_LE(block.bytes, rules.block_bytes);
      if (block.direct != nullptr) {
        ASSERT_GE(block.offset, block.direct->offset);
        ASSERT_LE(block.end(), block.direct->end());
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(block.direct->memory.data +
                                                   (block.offset - block.direct->offset)) %
                      512,
                  0U);
      }
      std::uint64_t seen = block.offset;
      for_each_segment(sample.layout, block.offset, block.end(), [&](const Segment& segment) {
        ASSERT_EQ(segment.offset, seen);
        ASSERT_GT(segment.bytes, 0U);
        seen += segment.bytes;
        const auto extents = extents_in(sample.layout, segment.offset, seen);
        ASSERT_EQ(extents.size(), segment.extent == nullptr ? 0U : 1U);
        if (segment.extent != nullptr) {
          ASSERT_EQ(&extents.front(), segment.extent);
          ASSERT_GE(segment.offset, segment.extent->offset);
          ASSERT_LE(seen, segment.extent->end());
        }
        for (const Checksum& checksum : sample.layout.checksums) {
          const bool touches = checksum.begin < seen && segment.offset < checksum.end;
          ASSERT_EQ(touches, &checksum == segment.checksum);
          if (touches) {
            ASSERT_TRUE(checksum.begin <= segment.offset && seen <= checksum.end);
          }
        }
      });
      ASSERT_EQ(seen, block.end());
      done = block.end();
    }
    ASSERT_EQ(done, sample.layout.bytes);
  }
}

}  // namespace
}  // namespace trunkline::tensor_file
