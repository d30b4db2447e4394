// The sizes of pages of memory on x86-64.
#pragma once

#include <cstdint>

#include "trunkline/units.h"

namespace trunkline {

inline constexpr std::uint64_t kPageBytes = 4 * kKiB;
inline constexpr std::uint64_t kHugePageBytes = 2 * kMiB;

}  // namespace trunkline
