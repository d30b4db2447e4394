// Copying and computing a checksum in one pass over memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trunkline {

// Each copies `source` to `target`, which do not overlap, past the cache when it is long, and returns
// crc32c(source, seed), crc32(source, seed).
std::uint32_t copy_with_crc32c(std::byte* target, std::span<const std::byte> source, std::uint32_t seed);
std::uint32_t copy_with_crc32(std::byte* target, std::span<const std::byte> source, std::uint32_t seed);

}  // namespace trunkline
