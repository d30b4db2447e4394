// The memory of units, in whole pages.
#pragma once

#include <cstdint>

namespace trunkline {

inline constexpr std::uint64_t kPageBytes = 4096;

constexpr std::uint64_t whole_pages(std::uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace trunkline
