#include "base/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace trunkline {
namespace {

std::span<const std::byte> view_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::uint64_t reflected(std::uint64_t value) {
  std::uint64_t result = 0;
  for (int bit = 0; bit < 64; ++bit) result |= ((value >> bit) & 1) << (63 - bit);
  return result;
}

// Bit by bit, following the definition.
std::uint64_t crc_by_definition(std::span<const std::byte> bytes, std::uint64_t polynomial) {
  const std::uint64_t reversed = reflected(polynomial);
  std::uint64_t state = ~std::uint64_t{0};
  for (const std::byte byte : bytes) {
    state ^= static_cast<std::uint64_t>(byte);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? reversed : 0);
  }
  return ~state;
}

__extension__ typedef unsigned __int128 Polynomial;

int degree(Polynomial value) {
  int result = -1;
  for (; value != 0; value >>= 1) ++result;
  return result;
}

Polynomial common_divisor(Polynomial a, Polynomial b) {
  while (b != 0) {
    while (degree(a) >= degree(b)) a ^= b << (degree(a) - degree(b));
    std::swap(a, b);
  }
  return a;
}

TEST(Digest, PublishedCheckValues) {
  EXPECT_EQ(digest_of(view_of("123456789")).ecma, 0x995DC9BBDF1939FAU);  // CRC-64/XZ
  EXPECT_EQ(digest_of({}), Digest());
}

TEST(Digest, IsThatOfItsDefinition) {
  std::mt19937_64 random(7);
  for (const std::size_t size : {1, 15, 16, 17, 255, 4096, 16383, 16384, 16385, 70001}) {
    std::vector<std::byte> bytes(size + 3);
    for (std::byte& each : bytes) each = static_cast<std::byte>(random());
    const std::span<const std::byte> text = std::span(bytes).subspan(size % 4);  // not aligned
    const Digest digest = digest_of(text);
    EXPECT_EQ(digest.ecma, crc_by_definition(text, kEcmaPolynomial)) << size;
    EXPECT_EQ(digest.jones, crc_by_definition(text, kJonesPolynomial)) << size;
  }
}

// So that both together have 128 bits.
TEST(Digest, ItsPolynomialsHaveNoCommonDivisor) {
  constexpr Polynomial kHighest = Polynomial{1} << 64;
  EXPECT_EQ(degree(common_divisor(kHighest | kEcmaPolynomial, kHighest | kJonesPolynomial)), 0);
}

TEST(Digest, EveryFlippedBitCounts) {
  std::vector<std::byte> bytes(512);
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    const Digest digest = digest_of(bytes);
    EXPECT_TRUE(seen.emplace(digest.ecma, digest.jones).second) << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(Digest, UnitsOfRangesComeInTheirOrder) {
  std::vector<std::byte> bytes(2'000'001);
  std::mt19937_64 random(8);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  const std::span<const std::byte> all = bytes;
  const std::vector<std::span<const std::byte>> ranges{all.first(8192), {}, all.subspan(1, 5000), all};
  for (const unsigned threads : {1U, 4U}) {
    std::vector<Digest> expected;
    for (const auto& range : ranges) {
      for (std::size_t at = 0; at < range.size(); at += 4096)
        expected.push_back(digest_of(range.subspan(at, std::min<std::size_t>(4096, range.size() - at))));
    }
    EXPECT_EQ(unit_digests(ranges, 4096, threads), expected);
  }
  EXPECT_TRUE(unit_digests({}, 4096, 4).empty());
}

}  // namespace
}  // namespace trunkline
