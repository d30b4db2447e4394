#include "trunkline/checksum.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <array>

#include "base/crc_fold.h"
#include "base/polynomials.h"

namespace trunkline {
namespace {

// Works on the raw CRC register, which the published checksums invert before and after.
std::uint32_t isal_crc32(std::span<const std::byte> bytes, std::uint32_t state) {
  return ~crc32_gzip_refl(~state, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

std::uint32_t isal_crc32c(std::span<const std::byte> bytes, std::uint32_t state) {
  // crc32_iscsi takes its length as an int.
  constexpr std::size_t kMaxPieceBytes = std::size_t{1} << 30;
  while (!bytes.empty()) {
    const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), kMaxPieceBytes));
    // The parameter lacks a const; the function only reads.
    auto* data = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(piece.data()));
    state = crc32_iscsi(data, static_cast<int>(piece.size()), state);
    bytes = bytes.subspan(piece.size());
  }
  return state;
}

// Appending n zero bytes to a message multiplies its checksum's register by x^(8 n); the inversions before
// and after cancel out when the checksum of the appended bytes is added.
std::uint32_t combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes,
                      std::uint32_t modulus) {
  return multiply(power_of_x(8, second_bytes, modulus), first, modulus) ^ second;
}

}  // namespace

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
  return combine(first, second, second_bytes, kCastagnoli);
}

std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
  return combine(first, second, second_bytes, kIsoHdlc);
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
  constexpr FoldConstants kConstants = fold_constants(kCastagnoli);
  std::uint32_t state = ~seed;
  // Processors have an instruction for CRC-32C, which lets ISA-L match the speed of folding 256 bits at a
  // time.
  std::array<std::byte, kFoldedBytes> folded;
  if (widest_fold() == FoldWidth::bits512) {
    if (const std::size_t done = fold(bytes, state, kConstants, folded); done != 0) {
      state = isal_crc32c(folded, 0);
      bytes = bytes.subspan(done);
    }
  }
  return ~isal_crc32c(bytes, state);
}

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t seed) {
  constexpr FoldConstants kConstants = fold_constants(kIsoHdlc);
  std::uint32_t state = ~seed;
  // Without AVX-512, ISA-L takes a third longer for CRC-32 than for CRC-32C.
  std::array<std::byte, kFoldedBytes> folded;
  if (const std::size_t done = fold(bytes, state, kConstants, folded); done != 0) {
    state = isal_crc32(folded, 0);
    bytes = bytes.subspan(done);
  }
  return ~isal_crc32(bytes, state);
}

}  // namespace trunkline
