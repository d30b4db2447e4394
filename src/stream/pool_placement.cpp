#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "stream/pages.h"
#include "trunkline/unit_cache.h"
#include "trunkline/units.h"

namespace trunkline {
Result<CachePlacement> place_pools(std::span<const std::uint64_t> unit_bytes,
                                   std::span<const std::size_t> pools, std::uint64_t memory_bytes) {
  CachePlacement placement;
  std::vector<std::size_t> units;  // by pool
  for (std::size_t unit = 0; unit < unit_bytes.size(); ++unit) {
    const std::size_t pool = pools[unit];
    if (pool >= units.size()) {
      units.resize(pool + 1);
      placement.slot_bytes.resize(pool + 1);
    }
    ++units[pool];
    placement.slot_bytes[pool] = std::max(placement.slot_bytes[pool], whole_pages(unit_bytes[unit]));
  }
  std::uint64_t least = 0;
  double all = 0;
  for (std::size_t pool = 0; pool < units.size(); ++pool) {
    placement.slots.push_back(std::min(kMinSlots, units[pool]));
    least += placement.slots[pool] * placement.slot_bytes[pool];
    all += static_cast<double>(units[pool]) * static_cast<double>(placement.slot_bytes[pool]);
  }
  if (memory_bytes < least) {
    return std::unexpected(make_error(
        ErrorKind::out_of_budget,
        fmt::format("memory_bytes: {} is too small for two units of each pool; pass at least {} bytes ({})",
                    format_size(memory_bytes), least, format_bytes(least))));
  }
  placement.memory_bytes = least;
  // First nearly the share that all pools can have, then slot by slot where it is lowest.
  const double share = std::min(1.0, static_cast<double>(memory_bytes - least) / std::max(all, 1.0));
  for (std::size_t pool = 0; pool < units.size(); ++pool) {
    const auto more = std::min(static_cast<std::size_t>(share * static_cast<double>(units[pool])),
                               units[pool] - placement.slots[pool]);
    placement.slots[pool] += more;
    placement.memory_bytes += more * placement.slot_bytes[pool];
  }
  while (true) {
    std::optional<std::size_t> lowest;
    for (std::size_t pool = 0; pool < units.size(); ++pool) {
      if (placement.slots[pool] == units[pool]) continue;
      if (placement.slot_bytes[pool] > memory_bytes - placement.memory_bytes) continue;
      if (!lowest || placement.slots[pool] * units[*lowest] < placement.slots[*lowest] * units[pool])
        lowest = pool;
    }
    if (!lowest) return placement;
    ++placement.slots[*lowest];
    placement.memory_bytes += placement.slot_bytes[*lowest];
  }
}

}  // namespace trunkline
