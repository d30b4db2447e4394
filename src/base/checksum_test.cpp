#include "trunkline/checksum.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "support/sanitizers.h"

namespace trunkline {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Bit by bit, following the definition (reflected, all ones before and after).
std::uint32_t crc_by_definition(std::span<const std::byte> bytes, std::uint32_t reflected_polynomial) {
  std::uint32_t state = 0xFFFFFFFF;
  for (const std::byte byte : bytes) {
    state ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? reflected_polynomial : 0);
  }
  return ~state;
}

TEST(Checksum, PublishedCheckValues) {
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283U);
  EXPECT_EQ(crc32(bytes_of("123456789")), 0xCBF43926U);
  // RFC 3720, B.4
  const std::vector<std::byte> zeros(32);
  const std::vector<std::byte> ones(32, std::byte{0xFF});
  EXPECT_EQ(crc32c(zeros), 0x8A9136AAU);
  EXPECT_EQ(crc32c(ones), 0x62A8AB43U);
}

TEST(Checksum, OfNoBytesIsTheSeed) {
  EXPECT_EQ(crc32c({}), 0U);
  EXPECT_EQ(crc32({}), 0U);
  EXPECT_EQ(crc32c({}, 0x12345678), 0x12345678U);
  EXPECT_EQ(crc32({}, 0x12345678), 0x12345678U);
}

TEST(Checksum, MatchesTheDefinitionAtEveryLengthAndInPieces) {
  std::mt19937 random(7);
  std::vector<std::byte> data(4000);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  for (std::size_t length = 0; length <= data.size(); length += length < 300 ? 1 : 37) {
    const auto bytes = std::span<const std::byte>(data).first(length);
    const std::uint32_t expected_c = crc_by_definition(bytes, 0x82F63B78);
    const std::uint32_t expected = crc_by_definition(bytes, 0xEDB88320);
    ASSERT_EQ(crc32c(bytes), expected_c) << length;
    ASSERT_EQ(crc32(bytes), expected) << length;
    const std::size_t cut = length == 0 ? 0 : random() % length;
    ASSERT_EQ(crc32c(bytes.subspan(cut), crc32c(bytes.first(cut))), expected_c)
        << length << " cut at " << cut;
    ASSERT_EQ(crc32(bytes.subspan(cut), crc32(bytes.first(cut))), expected) << length << " cut at " << cut;
  }
}

TEST(Checksum, BeyondTwoGibibytes) {
  if (test::kUnderThreadSanitizer) GTEST_SKIP() << "one thread: the thread sanitizer has nothing to find";
  constexpr std::size_t kBytes = (std::size_t{2} << 30) + (std::size_t{1} << 20) + 3;
  // Untouched private pages all map the zero page: this needs address space, not memory.
  void* mapped = ::mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) GTEST_SKIP() << "no address space for 2 GiB: " << std::strerror(errno);
  ::madvise(mapped, kBytes, MADV_NOHUGEPAGE);
  const std::span<const std::byte> zeros(static_cast<const std::byte*>(mapped), kBytes);
  std::uint32_t in_pieces_c = 1;
  std::uint32_t in_pieces = 1;
  for (std::size_t done = 0; done < kBytes;) {
    const std::size_t piece = std::min(kBytes - done, std::size_t{700} << 20);
    in_pieces_c = crc32c(zeros.subspan(done, piece), in_pieces_c);
    in_pieces = crc32(zeros.subspan(done, piece), in_pieces);
    done += piece;
  }
  EXPECT_EQ(crc32c(zeros, 1), in_pieces_c);
  EXPECT_EQ(crc32(zeros, 1), in_pieces);
  ::munmap(mapped, kBytes);
}

// Uses lengths around those at which the implementation changes, at every offset within a cache line.
TEST(Checksum, AnyLengthAlignmentAndSeed) {
  std::mt19937_64 random(9);
  std::vector<std::byte> bytes(9000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t length = 0; length < 8192; length += length < 1400 ? 1 : 61) {
    const auto part = std::span<const std::byte>(bytes).subspan(random() % 64, length);
    const std::size_t cut = length == 0 ? 0 : random() % length;
    ASSERT_EQ(crc32c(part), crc_by_definition(part, 0x82F63B78)) << length;
    ASSERT_EQ(crc32(part), crc_by_definition(part, 0xEDB88320)) << length;
    ASSERT_EQ(crc32c(part.subspan(cut), crc32c(part.first(cut))), crc32c(part));
    ASSERT_EQ(crc32(part.subspan(cut), crc32(part.first(cut))), crc32(part));
  }
}

TEST(Checksum, CombiningPiecesGivesTheChecksumOfTheWhole) {
  std::mt19937_64 random(7);
  std::vector<std::byte> bytes(200'000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const std::span<const std::byte> whole(bytes);
  for (int round = 0; round < 200; ++round) {
    const std::size_t total = random() % (round < 100 ? 100 : bytes.size());
    const std::size_t cut = total == 0 ? 0 : random() % (total + 1);
    const auto first = whole.first(cut);
    const auto second = whole.subspan(cut, total - cut);
    EXPECT_EQ(crc32c_combine(crc32c(first), crc32c(second), second.size()), crc32c(whole.first(total)));
    EXPECT_EQ(crc32_combine(crc32(first), crc32(second), second.size()), crc32(whole.first(total)));
  }
}

}  // namespace
}  // namespace trunkline
