// Folds long messages for 32-bit checksums, 256 or 512 bits at a time, optionally copying them along the way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/polynomials.h"

namespace trunkline {

inline constexpr std::size_t kFoldedBytes = 128;

// Multipliers that move 128 bits of a message forward by kFoldedBytes.
struct FoldConstants {
  std::uint64_t low;
  std::uint64_t high;
};

// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009: for
// reflected checksums the constants are x^(D+32) and x^(D-32), where D is the distance in bits, shifted left
// by one.
constexpr FoldConstants fold_constants(std::uint32_t polynomial) {
  constexpr std::uint64_t kDistance = 8 * kFoldedBytes;
  return {.low = std::uint64_t{power_of_x(1, kDistance + 32, polynomial)} << 1,
          .high = std::uint64_t{power_of_x(1, kDistance - 32, polynomial)} << 1};
}

// The width of one multiplication: VPCLMULQDQ with AVX2 or AVX-512.
enum class FoldWidth : std::uint8_t { none, bits256, bits512 };

FoldWidth widest_fold();  // that this processor supports

// Replaces the first bytes of a message by kFoldedBytes that leave the checksum's register in the same state.
// The register holds `state` before the original bytes, and zero before their replacement. Returns how many
// bytes were replaced: 0 where the message is short, or `width` is none.
std::size_t fold(std::span<const std::byte> bytes, std::uint32_t state, const FoldConstants& constants,
                 std::array<std::byte, kFoldedBytes>& folded, FoldWidth width = widest_fold());

inline constexpr std::size_t kFoldedCopyAlignment = 64;

// Also copies the replaced bytes to `target`, a multiple of kFoldedCopyAlignment, with non-temporal stores.
std::size_t fold_and_copy(std::span<const std::byte> bytes, std::uint32_t state,
                          const FoldConstants& constants, std::array<std::byte, kFoldedBytes>& folded,
                          std::byte* target, FoldWidth width = widest_fold());

}  // namespace trunkline
