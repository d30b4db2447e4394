// Whole multiples of a unit.
#pragma once

#include <cstdint>

namespace trunkline {

constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) { return value / unit * unit; }

// `value` + `unit` - 1 must not overflow.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return round_down(value + unit - 1, unit);
}

}  // namespace trunkline
