// Copies memory and computes its checksum in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trunkline {

// Each copies `source` to `target`, which must not overlap, and returns crc32c(source, seed) or crc32(source,
// seed). Long copies bypass the cache.
std::uint32_t copy_with_crc32c(std::byte* target, std::span<const std::byte> source, std::uint32_t seed);
std::uint32_t copy_with_crc32(std::byte* target, std::span<const std::byte> source, std::uint32_t seed);

}  // namespace trunkline
