#include "mem/summed_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/crc_fold.h"
#include "base/polynomials.h"
#include "mem/streaming_copy.h"
#include "trunkline/checksum.h"

namespace trunkline {
namespace {

// Shorter ones are read again soon, and stay in the cache (as with streaming_copy).
constexpr std::size_t kLongBytes = 256 * 1024;

using Checksum = std::uint32_t (*)(std::span<const std::byte>, std::uint32_t);

std::uint32_t copy_piece(Checksum checksum, std::byte* target, std::span<const std::byte> source,
                         std::uint32_t seed) {
  const std::uint32_t value = checksum(source, seed);
  if (!source.empty()) std::memcpy(target, source.data(), source.size());
  return value;
}

// Piece by piece, so that each is still in the cache when it is copied after its checksum was computed.
std::uint32_t copy_piecewise(Checksum checksum, std::byte* target, std::span<const std::byte> source,
                             std::uint32_t value) {
  while (!source.empty()) {
    const std::span<const std::byte> piece = source.first(std::min(source.size(), kLongBytes));
    value = checksum(piece, value);
    streaming_copy(target, piece.data(), piece.size());
    target += piece.size();
    source = source.subspan(piece.size());
  }
  return value;
}

std::uint32_t copy_with(Checksum checksum, const FoldConstants& constants, std::byte* target,
                        std::span<const std::byte> source, std::uint32_t value) {
  if (source.size() < kLongBytes) return copy_piece(checksum, target, source, value);
  const std::size_t misplaced = reinterpret_cast<std::uintptr_t>(target) % kFoldedCopyAlignment;
  const std::size_t head = misplaced == 0 ? 0 : kFoldedCopyAlignment - misplaced;
  std::array<std::byte, kFoldedBytes> folded;
  const std::uint32_t before = checksum(source.first(head), value);
  const std::size_t done = fold_and_copy(source.subspan(head), ~before, constants, folded, target + head);
  if (done == 0) return copy_piecewise(checksum, target, source, value);
  std::memcpy(target, source.data(), head);
  // The published checksums invert the register before and after: this makes the register zero before
  // `folded`.
  constexpr std::uint32_t kZeroRegister = 0xFFFFFFFF;
  return copy_piece(checksum, target + head + done, source.subspan(head + done),
                    checksum(folded, kZeroRegister));
}

}  // namespace

std::uint32_t copy_with_crc32c(std::byte* target, std::span<const std::byte> source, std::uint32_t seed) {
  constexpr FoldConstants kConstants = fold_constants(kCastagnoli);
  return copy_with(&crc32c, kConstants, target, source, seed);
}

std::uint32_t copy_with_crc32(std::byte* target, std::span<const std::byte> source, std::uint32_t seed) {
  constexpr FoldConstants kConstants = fold_constants(kIsoHdlc);
  return copy_with(&crc32, kConstants, target, source, seed);
}

}  // namespace trunkline
