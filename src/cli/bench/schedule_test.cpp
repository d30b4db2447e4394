#include "cli/bench/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

namespace trunkline::cli {
namespace {

std::vector<Piece> pass(Schedule& schedule, std::size_t limit) {
  std::vector<Piece> pieces;
  while (pieces.size() < limit) {
    const auto piece = schedule.next();
    if (!piece) break;
    pieces.push_back(*piece);
  }
  return pieces;
}

TEST(Schedule, SequentialRunsFrontToBackAndEndsShort) {
  Schedule schedule(10'000, 4096, Order::sequential, 0, false);
  const auto pieces = pass(schedule, 100);
  ASSERT_EQ(pieces.size(), 3U);
  EXPECT_EQ(pieces[1].offset, 4096U);
  EXPECT_EQ(pieces[2].offset, 8192U);
  EXPECT_EQ(pieces[2].bytes, 10'000U - 8192U);
  EXPECT_FALSE(schedule.next().has_value());
}

TEST(Schedule, RandomCoversEveryByteOncePerPass) {
  Schedule schedule(1'000'001, 4096, Order::random, 9, true);
  std::vector<std::uint64_t> first_order;
  for (int round = 0; round < 3; ++round) {
    std::map<std::uint64_t, std::uint64_t> covered;
    std::vector<std::uint64_t> order;
    for (const Piece& piece : pass(schedule, 245)) {
      covered[piece.offset] = piece.bytes;
      order.push_back(piece.offset);
    }
    std::uint64_t next = 0;
    for (const auto& [offset, bytes] : covered) {
      EXPECT_EQ(offset, next);
      next = offset + bytes;
    }
    EXPECT_EQ(next, 1'000'001U);
    if (round == 0) first_order = order;
    if (round == 1) {
      EXPECT_NE(order, first_order);
    }
  }
}

TEST(Schedule, EmptyFileHasNoPieces) {
  EXPECT_FALSE(Schedule(0, 4096, Order::sequential, 0, true).next().has_value());
  EXPECT_FALSE(Schedule(0, 4096, Order::random, 0, false).next().has_value());
}

TEST(Schedule, VariedSizesCoverEveryByteOncePerPass) {
  constexpr std::uint64_t kBytes = 40'000'123;
  for (const Order order : {Order::sequential, Order::random}) {
    Schedule schedule(kBytes, 16 * 4096, order, 5, true);
    schedule.vary_sizes(4096);
    for (int round = 0; round < 2; ++round) {
      std::map<std::uint64_t, std::uint64_t> covered;
      std::map<std::uint64_t, unsigned> sizes;
      std::uint64_t next = 0;
      std::uint64_t total = 0;
      while (total < kBytes) {
        const auto piece = schedule.next();
        ASSERT_TRUE(piece.has_value());
        covered[piece->offset] = piece->bytes;
        ++sizes[piece->bytes / 4096];
        total += piece->bytes;
      }
      for (const auto& [offset, bytes] : covered) {
        EXPECT_EQ(offset, next);
        EXPECT_LE(bytes, 16U * 4096);
        next = offset + bytes;
      }
      EXPECT_EQ(next, kBytes);
      // About 1150 pieces over 16 sizes.
      for (std::uint64_t size = 1; size <= 16; ++size) EXPECT_GT(sizes[size], 35U) << size;
    }
  }
}

TEST(Schedule, VariedSizesDependOnTheSeedAlone) {
  const auto sizes = [](std::uint64_t seed) {
    Schedule schedule(1 << 20, 65536, Order::sequential, seed, false);
    schedule.vary_sizes(4096);
    std::vector<std::uint64_t> result;
    while (const auto piece = schedule.next()) result.push_back(piece->bytes);
    return result;
  };
  EXPECT_EQ(sizes(3), sizes(3));
  EXPECT_NE(sizes(3), sizes(4));
}

TEST(Schedule, MixesReadsAndWritesInTheGivenShare) {
  for (const unsigned percent : {0U, 1U, 70U, 99U, 100U}) {
    Schedule schedule(100'000 * 4096ULL, 4096, Order::sequential, 3, true);
    schedule.mix(percent);
    unsigned reads = 0;
    std::vector<Op> first;
    for (unsigned index = 0; index < 100'000; ++index) {
      first.push_back(schedule.next()->op.value());
      reads += first.back() == Op::read ? 1 : 0;
    }
    EXPECT_NEAR(reads, percent * 1000.0, percent % 100 == 0 ? 0 : 600) << percent;
    if (percent != 70) continue;
    unsigned same = 0;  // in the next pass
    for (const Op op : first) same += schedule.next()->op == op ? 1 : 0;
    EXPECT_NEAR(same, 58'000, 1500);
  }
  EXPECT_FALSE(Schedule(4096, 4096, Order::sequential, 3, false).next()->op.has_value());
}

TEST(Schedule, CanBeRestricted) {
  Schedule schedule(10 * 4096, 4096, Order::sequential, 1, true);
  schedule.restrict_to(28, 4);
  std::vector<std::uint64_t> offsets;
  while (const auto piece = schedule.next()) offsets.push_back(piece->offset / 4096);
  EXPECT_EQ(offsets, (std::vector<std::uint64_t>{8, 9, 0, 1}));
}

}  // namespace
}  // namespace trunkline::cli
