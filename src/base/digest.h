// Digests of 128 bits, which decide whether data has changed. Not cryptographic: they find changes that
// nobody has constructed to go unnoticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace trunkline {

// Two CRC-64 with different polynomials. These have no common divisor, so both together are one CRC by their
// product, of degree 128: of two different texts of the same length, they are equal with a probability of
// 2^-128.
struct Digest {
  std::uint64_t ecma = 0;   // ECMA-182, reflected, inverted before and after (CRC-64/XZ)
  std::uint64_t jones = 0;  // the polynomial of Jones, likewise
  bool operator==(const Digest&) const = default;
};

inline constexpr std::uint64_t kEcmaPolynomial = 0x42F0E1EBA9EA3693;   // without x^64, highest power first
inline constexpr std::uint64_t kJonesPolynomial = 0xAD93D23594C935A9;  // likewise

Digest digest_of(std::span<const std::byte> bytes);

// Those of the units of each range, one after the other: `unit_bytes` each, the last of a range maybe
// shorter. On up to `threads` threads.
std::vector<Digest> unit_digests(std::span<const std::span<const std::byte>> ranges, std::size_t unit_bytes,
                                 unsigned threads);

}  // namespace trunkline
