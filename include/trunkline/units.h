// Sizes as people write them. GB is always 10^9 bytes and GiB 2^30.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline {

inline constexpr std::uint64_t kKiB = 1ULL << 10;
inline constexpr std::uint64_t kMiB = 1ULL << 20;
inline constexpr std::uint64_t kGiB = 1ULL << 30;
inline constexpr std::uint64_t kMB = 1'000'000;
inline constexpr std::uint64_t kGB = 1'000'000'000;

// Bytes of "4096", "400MB", "1.5 GiB". "64k" is rejected: a unit is B, kB, KB, MB, GB, TB, KiB, MiB, GiB or
// TiB (case is ignored). Fails with invalid_argument on anything else, including negative and fractional
// bytes.
Result<std::uint64_t> parse_bytes(std::string_view text);

// "1.00 GB", "112.0 KiB" for exact multiples of KiB below 1 MB, "17 B".
std::string format_bytes(std::uint64_t bytes);

// For sizes that someone has chosen: "64 MiB", "4 KiB", "20 GB" where that is exact, else as format_bytes().
std::string format_size(std::uint64_t bytes);

// "3.98 GB/s", "420 MB/s".
std::string format_rate(double bytes_per_second);

}  // namespace trunkline
