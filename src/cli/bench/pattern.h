// The content of benchmark files: every 8-byte word encodes the file, position and pass that it belongs to,
// so a byte that is wrong, misplaced or left over from an earlier pass is detected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace trunkline::cli {

struct Pattern {
  std::uint64_t seed = 0;  // differs from pass to pass
  std::uint64_t file = 0;  // index of the file in the run

  bool operator==(const Pattern&) const = default;
};

inline constexpr std::size_t kPatternHeaderBytes = 32;  // at the start of a file: identifies its pattern

// Generates the content of `bytes` at `offset` (a multiple of 8) of a file. Looks random, so that devices
// cannot compress it.
void fill_pattern(const Pattern& pattern, std::uint64_t offset, std::span<std::byte> bytes);

// The offset in the file of the first byte that differs from the pattern, nullopt when none does.
std::optional<std::uint64_t> first_wrong_byte(const Pattern& pattern, std::uint64_t offset,
                                              std::span<const std::byte> bytes);

// The pattern of the file that starts with `header`; nullopt when that is not the start of a benchmark file.
std::optional<Pattern> pattern_of_header(std::span<const std::byte> header);

}  // namespace trunkline::cli
