#include "cli/bench/pattern.h"

#include <algorithm>
#include <cstring>

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kMagic = 0x314e'5242'4e4c'5254;  // "TRLNBRN1" in memory
constexpr std::uint64_t kHeaderWords = kPatternHeaderBytes / 8;

// The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
// 2014).
std::uint64_t mix(std::uint64_t value) {
  value += 0x9e37'79b9'7f4a'7c15;
  value = (value ^ (value >> 30)) * 0xbf58'476d'1ce4'e5b9;
  value = (value ^ (value >> 27)) * 0x94d0'49bb'1331'11eb;
  return value ^ (value >> 31);
}

std::uint64_t key_of(const Pattern& pattern) { return mix(mix(pattern.seed) ^ pattern.file); }

std::uint64_t header_word(const Pattern& pattern, std::uint64_t index) {
  switch (index) {
    case 0:
      return kMagic;
    case 1:
      return pattern.seed;
    case 2:
      return pattern.file;
    default:
      return key_of(pattern) ^ kMagic;
  }
}

}  // namespace

void fill_pattern(const Pattern& pattern, std::uint64_t offset, std::span<std::byte> bytes) {
  const std::uint64_t key = key_of(pattern);
  std::uint64_t index = offset / 8;
  std::byte* out = bytes.data();
  std::byte* const end = out + bytes.size();
  for (; out != end; ++index) {
    const std::uint64_t word = index < kHeaderWords ? header_word(pattern, index) : mix(key + index);
    const auto part = std::min<std::ptrdiff_t>(8, end - out);
    if (part == 8) {
      std::memcpy(out, &word, 8);
    } else {
      std::memcpy(out, &word, static_cast<std::size_t>(part));
    }
    out += part;
  }
}

std::optional<std::uint64_t> first_wrong_byte(const Pattern& pattern, std::uint64_t offset,
                                              std::span<const std::byte> bytes) {
  constexpr std::size_t kWindowBytes = 4096;  // stays in the first-level cache
  std::byte expected[kWindowBytes];
  for (std::size_t done = 0; done < bytes.size(); done += kWindowBytes) {
    const std::size_t part = std::min(kWindowBytes, bytes.size() - done);
    fill_pattern(pattern, offset + done, {expected, part});
    if (std::memcmp(expected, bytes.data() + done, part) == 0) continue;
    const auto wrong = std::mismatch(expected, expected + part, bytes.data() + done).first;
    return offset + done + static_cast<std::uint64_t>(wrong - expected);
  }
  return std::nullopt;
}

std::optional<Pattern> pattern_of_header(std::span<const std::byte> header) {
  if (header.size() < kPatternHeaderBytes) return std::nullopt;
  std::uint64_t words[kHeaderWords];
  std::memcpy(words, header.data(), sizeof words);
  const Pattern pattern{.seed = words[1], .file = words[2]};
  if (words[0] != kMagic || words[3] != header_word(pattern, 3)) return std::nullopt;
  return pattern;
}

}  // namespace trunkline::cli
