// The memory of units: slots of whole pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/rounding.h"
#include "mem/page_sizes.h"

namespace trunkline {

inline constexpr std::size_t kMinSlots = 2;  // one in use, one being read

constexpr std::uint64_t whole_pages(std::uint64_t bytes) { return round_up(bytes, kPageBytes); }

}  // namespace trunkline
