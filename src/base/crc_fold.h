// Folding long messages for checksums of 32 bits, 256 bits at a time, and copying them on the way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/polynomials.h"

namespace trunkline {

inline constexpr std::size_t kFoldedBytes = 128;

// What is multiplied to move 128 bits of a message forward by kFoldedBytes.
struct FoldConstants {
  std::uint64_t low;
  std::uint64_t high;
};

// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009: for
// reflected checksums x^(D+32) and x^(D-32) where D is the distance in bits, shifted left by one.
constexpr FoldConstants fold_constants(std::uint32_t polynomial) {
  constexpr std::uint64_t kDistance = 8 * kFoldedBytes;
  return {.low = std::uint64_t{power_of_x(1, kDistance + 32, polynomial)} << 1,
          .high = std::uint64_t{power_of_x(1, kDistance - 32, polynomial)} << 1};
}

// Replaces the first bytes of a message, with `state` in the checksum's register before them, by kFoldedBytes
// that leave the same register when it is zero before them. Returns how many bytes those replace: 0 where
// they are few, or the processor has no VPCLMULQDQ.
std::size_t fold(std::span<const std::byte> bytes, std::uint32_t state, const FoldConstants& constants,
                 std::array<std::byte, kFoldedBytes>& folded);

inline constexpr std::size_t kFoldedCopyAlignment = 32;

// Also copies what it replaces to `target`, a multiple of kFoldedCopyAlignment, with non-temporal stores.
std::size_t fold_and_copy(std::span<const std::byte> bytes, std::uint32_t state,
                          const FoldConstants& constants, std::array<std::byte, kFoldedBytes>& folded,
                          std::byte* target);

}  // namespace trunkline
