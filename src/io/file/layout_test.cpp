#include "io/file/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace trunkline::io {
namespace {

struct Place {
  unsigned member;
  std::uint64_t offset;
};

// Deals out bytes one by one: a stripe unit to each member in turn.
std::vector<Place> deal(const Layout& layout, std::uint64_t bytes) {
  std::vector<std::uint64_t> filled(layout.members, 0);
  std::vector<Place> places;
  unsigned member = 0;
  std::uint64_t in_unit = 0;
  for (std::uint64_t i = 0; i < bytes; ++i) {
    places.push_back({member, filled[member]++});
    if (++in_unit == layout.stripe_bytes) {
      in_unit = 0;
      member = (member + 1) % layout.members;
    }
  }
  return places;
}

TEST(Layout, AgreesWithDealingByteByByte) {
  for (unsigned members = 2; members <= 5; ++members) {
    for (const std::uint64_t stripe_bytes : {1, 3, 8}) {
      const Layout layout{members, stripe_bytes};
      const auto places = deal(layout, 100);
      for (std::uint64_t bytes = 0; bytes <= places.size(); ++bytes) {
        std::vector<std::uint64_t> sizes(members, 0);
        for (std::uint64_t i = 0; i < bytes; ++i) ++sizes[places[i].member];
        for (unsigned member = 0; member < members; ++member)
          ASSERT_EQ(layout.member_bytes(member, bytes), sizes[member]) << members << " x " << stripe_bytes;
      }
      for (std::uint64_t offset = 0; offset < places.size(); ++offset) {
        const auto run = layout.locate(offset, places.size() - offset);
        ASSERT_GT(run.length, 0U);
        for (std::uint64_t i = 0; i < run.length; ++i) {
          ASSERT_EQ(places[offset + i].member, run.member);
          ASSERT_EQ(places[offset + i].offset, run.offset + i);
        }
      }
    }
  }
}

TEST(Layout, RunsTileAnyRange) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 500; ++round) {
    const Layout layout{2 + static_cast<unsigned>(random() % 9), 4096 * (1 + random() % 300)};
    const std::uint64_t offset = random() % (1ULL << 50);
    const std::uint64_t end = offset + random() % (64 * layout.stripe_bytes);
    std::vector<std::uint64_t> moved(layout.members, 0);
    for (std::uint64_t at = offset; at < end;) {
      const auto run = layout.locate(at, end - at);
      ASSERT_LT(run.member, layout.members);
      ASSERT_GT(run.length, 0U);
      ASSERT_LE(run.length, std::min(end - at, layout.stripe_bytes));
      // The bytes before `at` end, in this member, where the run starts.
      ASSERT_EQ(run.offset, layout.member_bytes(run.member, at));
      moved[run.member] += run.length;
      at += run.length;
    }
    for (unsigned member = 0; member < layout.members; ++member)
      ASSERT_EQ(moved[member], layout.member_bytes(member, end) - layout.member_bytes(member, offset));
  }
}

TEST(Layout, MemberBytesAddUpAndNeverShrink) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 2000; ++round) {
    const Layout layout{1 + static_cast<unsigned>(random() % 16), 4096 * (1 + random() % 1000)};
    const std::uint64_t bytes = random() >> (1 + random() % 62);
    std::uint64_t total = 0;
    for (unsigned member = 0; member < layout.members; ++member) {
      total += layout.member_bytes(member, bytes);
      ASSERT_LE(layout.member_bytes(member, bytes), layout.member_bytes(member, bytes + 1));
    }
    ASSERT_EQ(total, bytes);
  }
}

TEST(Layout, OneMemberIsTheFileItself) {
  const Layout layout;
  const auto run = layout.locate(12'345, 1ULL << 40);
  EXPECT_EQ(run.member, 0U);
  EXPECT_EQ(run.offset, 12'345U);
  EXPECT_EQ(run.length, 1ULL << 40);
  EXPECT_EQ(layout.member_bytes(0, 777), 777U);
}

}  // namespace
}  // namespace trunkline::io
