#include "io/lane/plan.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace trunkline::io {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

struct Case {
  const char* what;
  Op op;
  std::uintptr_t address;
  std::uint64_t offset;
  std::uint64_t length;
  std::vector<Piece> pieces;
};

std::vector<Piece> cut(Op op, const PlanLimits& limits, std::uintptr_t address, std::uint64_t offset,
                       std::uint64_t length) {
  std::vector<Piece> pieces;
  while (length > 0) {
    const Piece piece = next_piece(op, limits, address, offset, length);
    pieces.push_back(piece);
    if (piece.length == 0 || piece.length > length) break;
    address += piece.length;
    offset += piece.length;
    length -= piece.length;
  }
  return pieces;
}

bool same(const Piece& a, const Piece& b) {
  return a.path == b.path && a.offset == b.offset && a.length == b.length && a.span_offset == b.span_offset &&
         a.span_length == b.span_length;
}

TEST(Plan, CutsAccordingToTheTable) {
  const PlanLimits limits{
      .direct = true, .memory_alignment = 512, .offset_alignment = 512, .block_bytes = kMiB};
  const std::vector<Case> cases = {
      {"an aligned read is direct", Op::read, 4096, 512, 1024, {{IoPath::direct, 512, 1024, 512, 1024}}},
      {"a block ends at a multiple of the block size",
       Op::read,
       4096,
       kMiB - 512,
       kMiB,
       {{IoPath::direct, kMiB - 512, 512, kMiB - 512, 512},
        {IoPath::direct, kMiB, kMiB - 512, kMiB, kMiB - 512}}},
      {"a small unaligned read is one bounced transfer",
       Op::read,
       4096,
       100,
       1000,
       {{IoPath::bounced, 100, 1000, 0, 1536}}},
      {"memory 64 bytes into a page bounces all",
       Op::read,
       4160,
       0,
       2 * kMiB,
       {{IoPath::bounced, 0, kMiB, 0, kMiB}, {IoPath::bounced, kMiB, kMiB, kMiB, kMiB}}},
      {"a long read with ragged ends is direct in between",
       Op::read,
       4096 + 12,
       12,
       512 * 1024,
       {{IoPath::bounced, 12, 500, 0, 512},
        {IoPath::direct, 512, 512 * 1024 - 512, 512, 512 * 1024 - 512},
        {IoPath::bounced, 512 * 1024, 12, 512 * 1024, 512}}},
      {"a write within a page goes through the cache",
       Op::write,
       4096,
       10,
       100,
       {{IoPath::buffered, 10, 100, 10, 100}}},
      {"a write that is aligned to the device but not to the page keeps its edges out of direct I/O",
       Op::write,
       4096 + 512,
       512,
       3 * 4096,
       {{IoPath::buffered, 512, 3584, 512, 3584},
        {IoPath::direct, 4096, 8192, 4096, 8192},
        {IoPath::buffered, 12288, 512, 12288, 512}}},
      {"a write from misplaced memory bounces",
       Op::write,
       4096 + 64,
       0,
       4096,
       {{IoPath::bounced, 0, 4096, 0, 4096}}},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(test.what);
    const auto pieces = cut(test.op, limits, test.address, test.offset, test.length);
    ASSERT_EQ(pieces.size(), test.pieces.size());
    for (std::size_t index = 0; index < pieces.size(); ++index)
      EXPECT_TRUE(same(pieces[index], test.pieces[index]))
          << "piece " << index << " at " << pieces[index].offset;
  }
}

TEST(Plan, BufferedFilesAreOnlyCutIntoBlocks) {
  const PlanLimits limits{.direct = false, .block_bytes = 4096};
  const auto pieces = cut(Op::write, limits, 3, 4000, 5000);
  ASSERT_EQ(pieces.size(), 3U);
  for (const Piece& piece : pieces) EXPECT_EQ(piece.path, IoPath::buffered);
  EXPECT_EQ(pieces[0].length, 96U);
  EXPECT_EQ(pieces[1].length, 4096U);
}

TEST(Plan, OnlyDirectPiecesAreLargerThanASlot) {
  const PlanLimits limits{
      .direct = true, .memory_alignment = 512, .offset_alignment = 512, .block_bytes = 4 * kMiB};
  const auto lengths = [&](Op op, std::uintptr_t address) {
    std::vector<std::uint64_t> found;
    for (const Piece& piece : cut(op, limits, address, 3 * kMiB, 6 * kMiB)) found.push_back(piece.length);
    return found;
  };
  const std::vector<std::uint64_t> blocks = {kMiB, 4 * kMiB, kMiB};
  const std::vector<std::uint64_t> slots(6, kMiB);
  EXPECT_EQ(lengths(Op::read, 4096), blocks);
  EXPECT_EQ(lengths(Op::write, 4096), blocks);
  EXPECT_EQ(lengths(Op::read, 4100), slots);
  EXPECT_EQ(lengths(Op::write, 4100), slots);
  PlanLimits buffered = limits;
  buffered.direct = false;
  for (const Piece& piece : cut(Op::write, buffered, 4096, 3 * kMiB, 6 * kMiB)) EXPECT_EQ(piece.length, kMiB);
}

// For any request: the pieces tile it in order, and what bypasses the cache is aligned and fits a block.
TEST(Plan, EveryCutIsValid) {
  std::mt19937_64 random(7);
  const std::uint64_t alignments[] = {1, 4, 512, 4096};
  for (int round = 0; round < 20000; ++round) {
    PlanLimits limits{.direct = true,
                      .memory_alignment = alignments[random() % 4],
                      .offset_alignment = alignments[1 + random() % 3],
                      .block_bytes = std::uint64_t{4096} << (random() % 11),
                      .host_memory = random() % 2 == 0};
    const Op op = random() % 2 == 0 ? Op::read : Op::write;
    std::uintptr_t address = 1 << 20;
    if (random() % 2 == 0) address += random() % 5000;
    std::uint64_t offset = random() % (4 * kMiB);
    if (random() % 2 == 0) offset = offset / 4096 * 4096;
    const std::uint64_t length = 1 + random() % (3 * kMiB);
    std::uint64_t at = offset;
    for (const Piece& piece : cut(op, limits, address, offset, length)) {
      ASSERT_EQ(piece.offset, at);
      ASSERT_GT(piece.length, 0U);
      ASSERT_LE(piece.span_offset, piece.offset);
      ASSERT_GE(piece.span_offset + piece.span_length, piece.offset + piece.length);
      const std::uintptr_t memory = address + (at - offset);
      if (piece.path != IoPath::buffered) {
        const std::uint64_t unit =
            op == Op::write ? std::max(limits.offset_alignment, kWriteGranularity) : limits.offset_alignment;
        ASSERT_LE(piece.span_length,
                  piece.path == IoPath::direct ? limits.block_bytes : slot_bytes(limits.block_bytes));
        ASSERT_EQ(piece.span_offset % unit, 0U);
        ASSERT_EQ(piece.span_length % unit, 0U);
      }
      if (!limits.host_memory) {
        ASSERT_TRUE(piece.through_slot);
        ASSERT_LE(piece.span_length, slot_bytes(limits.block_bytes));
      }
      if (piece.path == IoPath::direct) {
        ASSERT_EQ(memory % limits.memory_alignment, 0U);
      }
      if (piece.path != IoPath::bounced || op == Op::write) {
        ASSERT_EQ(piece.span_offset, piece.offset);
        ASSERT_EQ(piece.span_length, piece.length);
      }
      if (op == Op::read) {
        ASSERT_NE(piece.path, IoPath::buffered);
      }
      at += piece.length;
    }
    ASSERT_EQ(at, offset + length);
  }
}

}  // namespace
}  // namespace trunkline::io
