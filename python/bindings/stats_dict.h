// Statistics of streams and caches of units as dicts: counts, and times in seconds.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace trunkline::python {

namespace nb = nanobind;

template <typename Stats>
struct StatsField {
  const char* name;
  std::uint64_t Stats::* value;
  bool is_ns = false;  // a time, which has the name of seconds
};

template <typename Stats, std::size_t count>
nb::dict stats_dict(const Stats& stats, const StatsField<Stats> (&fields)[count]) {
  nb::dict dict;
  for (const auto& [name, value, is_ns] : fields) {
    if (is_ns) {
      dict[name] = static_cast<double>(stats.*value) * 1e-9;
    } else {
      dict[name] = stats.*value;
    }
  }
  return dict;
}

}  // namespace trunkline::python
