#include "cli/bench/pattern.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace trunkline::cli {
namespace {

std::vector<std::byte> content(const Pattern& pattern, std::uint64_t offset, std::size_t bytes) {
  std::vector<std::byte> result(bytes);
  fill_pattern(pattern, offset, result);
  return result;
}

TEST(Pattern, PiecesAreTheSameAsOneFill) {
  const Pattern pattern{.seed = 7, .file = 3};
  const auto whole = content(pattern, 0, 20'000);
  for (const std::size_t piece : {8U, 24U, 4096U, 9000U}) {
    for (std::size_t at = 0; at < whole.size(); at += piece) {
      const auto part = content(pattern, at, std::min(piece, whole.size() - at));
      ASSERT_EQ(0, std::memcmp(part.data(), whole.data() + at, part.size())) << piece << " at " << at;
    }
  }
}

TEST(Pattern, EveryFlippedByteIsLocated) {
  const Pattern pattern{.seed = 1, .file = 0};
  auto bytes = content(pattern, 8192, 8211);  // more than two windows, and not a multiple of 8
  EXPECT_EQ(first_wrong_byte(pattern, 8192, bytes), std::nullopt);
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    bytes[at] ^= std::byte{0x10};
    ASSERT_EQ(first_wrong_byte(pattern, 8192, bytes), 8192 + at);
    bytes[at] ^= std::byte{0x10};
  }
}

TEST(Pattern, MisplacedStaleAndForeignBlocksAreDetected) {
  const Pattern pattern{.seed = 1, .file = 0};
  EXPECT_EQ(first_wrong_byte(pattern, 4096, content(pattern, 8192, 4096)), 4096U);  // misplaced
  EXPECT_EQ(first_wrong_byte(pattern, 4096, content({.seed = 2, .file = 0}, 4096, 4096)), 4096U);  // stale
  EXPECT_EQ(first_wrong_byte(pattern, 4096, content({.seed = 1, .file = 1}, 4096, 4096)),
            4096U);                                                                 // other file
  EXPECT_EQ(first_wrong_byte(pattern, 4096, std::vector<std::byte>(4096)), 4096U);  // never written
}

TEST(Pattern, TheHeaderIdentifiesThePattern) {
  const Pattern pattern{.seed = 0xfeed'beef'0123, .file = 17};
  auto bytes = content(pattern, 0, kPatternHeaderBytes);
  EXPECT_EQ(pattern_of_header(bytes), pattern);
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    bytes[at] ^= std::byte{1};
    EXPECT_EQ(pattern_of_header(bytes), std::nullopt) << at;
    bytes[at] ^= std::byte{1};
  }
  EXPECT_EQ(pattern_of_header(std::span(bytes).first(31)), std::nullopt);
}

}  // namespace
}  // namespace trunkline::cli
