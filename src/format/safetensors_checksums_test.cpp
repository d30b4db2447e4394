#include "format/safetensors_checksums.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <span>
#include <string>

#include "trunkline/checksum.h"

namespace trunkline::format {
namespace {

std::uint32_t checksum_of(std::string_view text) { return crc32c(std::as_bytes(std::span(text))); }

// A head as docs/formats/safetensors-checksums.md describes it, and the entry in it.
struct Written {
  std::string head;
  Metadata metadata;
};

Written write_head(std::span<const std::string> chunks, std::uint64_t chunk_bytes, std::size_t padding = 8) {
  const std::string before = "12345678{\"__metadata__\":{\"trunkline.crc32c\":\"";
  const std::string after = "\"}}" + std::string(padding, ' ');
  const std::size_t digits = 8 * (1 + chunks.size());
  const std::size_t head_bytes = before.size() + 33 + digits + after.size();
  std::string entry = fmt::format("{:013d} {:09d} ", chunk_bytes, head_bytes);
  entry += fmt::format("{:08x} ", checksum_of(entry));
  const std::string blank = before + entry + std::string(digits, '0') + after;
  entry += fmt::format("{:08x}", checksum_of(blank));
  for (const std::string& chunk : chunks) entry += fmt::format("{:08x}", checksum_of(chunk));
  return {before + entry + after, {{std::string(kChecksumsKey), entry}}};
}

const std::string kChunks[] = {"abcd", "efgh", "ij"};
constexpr std::uint64_t kDataBytes = 10;

TEST(SafetensorsChecksums, AreThoseOfTheChunks) {
  const Written written = write_head(kChunks, 4);
  const auto found = find_safetensors_checksums(written.metadata, written.head, kDataBytes, "a");
  ASSERT_TRUE(found) << found.error().message;
  const SafetensorsChecksums checksums = found->value_or(SafetensorsChecksums{});
  EXPECT_EQ(checksums.chunk_bytes, 4U);
  EXPECT_EQ(checksums.crc32c, (std::vector{checksum_of("abcd"), checksum_of("efgh"), checksum_of("ij")}));
}

TEST(SafetensorsChecksums, OfOtherPrograms) {
  const Metadata none = {{"format", "pt"}};
  EXPECT_EQ(find_safetensors_checksums(none, "head", kDataBytes, "a")->has_value(), false);
  // A header of another size, and one with the padding of the reference implementation.
  const Written written = write_head(kChunks, 4);
  EXPECT_EQ(find_safetensors_checksums(written.metadata, written.head + " ", kDataBytes, "a")->has_value(),
            false);
  const Written short_padding = write_head(kChunks, 4, 7);
  EXPECT_EQ(
      find_safetensors_checksums(short_padding.metadata, short_padding.head, kDataBytes, "a")->has_value(),
      false);
}

TEST(SafetensorsChecksums, EveryChangedCharacterOfTheHeadIsFound) {
  const Written written = write_head(kChunks, 4);
  const std::string& entry = written.metadata.begin()->second;
  const std::size_t begin = written.head.find(entry);
  for (std::size_t i = 0; i + 8 < written.head.size(); ++i) {
    std::string head = written.head;
    head[i] = static_cast<char>(head[i] ^ 1);
    Metadata metadata = written.metadata;
    if (i >= begin && i < begin + entry.size()) metadata.begin()->second = head.substr(begin, entry.size());
    const auto found = find_safetensors_checksums(metadata, head, kDataBytes, "a.safetensors");
    // Digits of the data's checksums are compared with the data.
    if (i >= begin + 33 + 8 && i < begin + entry.size() && found) continue;
    ASSERT_FALSE(found) << "character " << i;
    EXPECT_EQ(found.error().kind, ErrorKind::corrupt);
    EXPECT_EQ(found.error().path, "a.safetensors");
  }
}

TEST(SafetensorsChecksums, AnotherNameOrNumberOfChunksIsCorrupt) {
  const Written written = write_head(kChunks, 4);
  const Metadata renamed = {{"trunkline.crc32d", written.metadata.begin()->second}};
  EXPECT_EQ(find_safetensors_checksums(renamed, written.head, kDataBytes, "a").error().kind,
            ErrorKind::corrupt);
  EXPECT_EQ(find_safetensors_checksums(written.metadata, written.head, kDataBytes + 3, "a").error().kind,
            ErrorKind::corrupt);
}

}  // namespace
}  // namespace trunkline::format
