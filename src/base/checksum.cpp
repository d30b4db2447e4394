#include "trunkline/checksum.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace trunkline {

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
  // crc32_iscsi takes its length as an int.
  constexpr std::size_t kMaxPieceBytes = std::size_t{1} << 30;
  // It works on the bare shift register; the published CRC-32C inverts that before and after.
  std::uint32_t state = ~seed;
  while (!bytes.empty()) {
    const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), kMaxPieceBytes));
    // The parameter lacks a const; the function only reads.
    auto* data = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(piece.data()));
    state = crc32_iscsi(data, static_cast<int>(piece.size()), state);
    bytes = bytes.subspan(piece.size());
  }
  return ~state;
}

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t seed) {
  // Inverts before and after by itself, unlike crc32_iscsi.
  return crc32_gzip_refl(seed, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

}  // namespace trunkline
