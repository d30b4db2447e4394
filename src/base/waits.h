// How long something took, and which waits the log names.
#pragma once

#include <chrono>
#include <cstdint>

namespace trunkline {

inline constexpr std::uint64_t kLongWaitNs = 1'000'000'000;

inline std::uint64_t ns_since(std::chrono::steady_clock::time_point start) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace trunkline
