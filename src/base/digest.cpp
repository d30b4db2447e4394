#include "base/digest.h"

#include <isa-l/crc64.h>

#include <algorithm>
#include <atomic>

#include "base/threads.h"

namespace trunkline {

// Both pass over a piece while it is in the cache.
Digest digest_of(std::span<const std::byte> bytes) {
  constexpr std::size_t kPieceBytes = 16 * 1024;
  Digest digest;
  while (!bytes.empty()) {
    const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), kPieceBytes));
    const auto* const data = reinterpret_cast<const unsigned char*>(piece.data());
    digest.ecma = crc64_ecma_refl(digest.ecma, data, piece.size());
    digest.jones = crc64_jones_refl(digest.jones, data, piece.size());
    bytes = bytes.subspan(piece.size());
  }
  return digest;
}

std::vector<Digest> unit_digests(std::span<const std::span<const std::byte>> ranges, std::size_t unit_bytes,
                                 unsigned threads) {
  constexpr std::size_t kUnitsAtOnce = 16;
  constexpr std::size_t kUnitsOfAThread = 128;  // starting one takes as long as several units
  std::vector<std::span<const std::byte>> units;
  for (std::span<const std::byte> range : ranges) {
    while (!range.empty()) {
      units.push_back(range.first(std::min(range.size(), unit_bytes)));
      range = range.subspan(units.back().size());
    }
  }
  std::vector<Digest> digests(units.size());
  std::atomic<std::size_t> next = 0;
  const std::size_t useful = 1 + units.size() / kUnitsOfAThread;
  side_by_side(std::min<std::size_t>(threads, useful), [&] {
    for (;;) {
      const std::size_t begin = next.fetch_add(kUnitsAtOnce);
      if (begin >= units.size()) return;
      const std::size_t end = std::min(begin + kUnitsAtOnce, units.size());
      for (std::size_t i = begin; i < end; ++i) digests[i] = digest_of(units[i]);
    }
  });
  return digests;
}

}  // namespace trunkline
