// The counts that StreamStats and UnitCacheStats have in common.
#pragma once

#include <cstdint>

namespace trunkline {

struct UnitLoadStats {
  std::uint64_t units_read = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t acquired = 0;
  std::uint64_t waited = 0;
  std::uint64_t wait_ns = 0;
  std::uint64_t verify_ns = 0;
  std::uint64_t read_ns = 0;
  std::uint64_t failed = 0;

  template <typename Stats>
  void copy_to(Stats& stats) const {
    stats.units_read = units_read;
    stats.bytes_read = bytes_read;
    stats.acquired = acquired;
    stats.waited = waited;
    stats.wait_ns = wait_ns;
    stats.verify_ns = verify_ns;
    stats.read_ns = read_ns;
    stats.failed = failed;
  }
};

}  // namespace trunkline
