// How the bytes of one logical file are distributed over its member files: round robin in stripe units. Pure
// arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace trunkline::io {

// A run of logical bytes that is contiguous in one member.
struct Run {
  unsigned member = 0;
  std::uint64_t offset = 0;  // in the member
  std::uint64_t length = 0;
};

struct Layout {
  unsigned members = 1;
  std::uint64_t stripe_bytes = 0;  // unused with one member

  // The run that starts at logical `offset`, at most `length` long.
  Run locate(std::uint64_t offset, std::uint64_t length) const {
    if (members == 1) return {0, offset, length};
    const std::uint64_t stripe = offset / stripe_bytes;
    const std::uint64_t within = offset % stripe_bytes;
    return {static_cast<unsigned>(stripe % members), stripe / members * stripe_bytes + within,
            std::min(length, stripe_bytes - within)};
  }

  // Bytes of member `index` when the logical file has `bytes`. They add up to `bytes` over all members.
  std::uint64_t member_bytes(unsigned index, std::uint64_t bytes) const {
    if (members == 1) return bytes;
    const std::uint64_t row_bytes = stripe_bytes * members;
    const std::uint64_t rest = bytes % row_bytes;
    const std::uint64_t before = std::uint64_t{index} * stripe_bytes;
    const std::uint64_t in_last_row = rest > before ? std::min(rest - before, stripe_bytes) : 0;
    return bytes / row_bytes * stripe_bytes + in_last_row;
  }
};

}  // namespace trunkline::io
