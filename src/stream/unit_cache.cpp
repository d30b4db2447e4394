#include "trunkline/unit_cache.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "stream/unit_cache_core.h"
#include "trunkline/units.h"

namespace trunkline {

Result<UnitCache> UnitCache::open(const Engine& engine, std::vector<File> files, std::vector<CacheUnit> units,
                                  const UnitCacheOptions& options) {
  std::vector<StreamUnit> described;
  std::vector<CacheSchedule::Place> places;
  std::vector<std::uint64_t> bytes;
  std::vector<std::size_t> pools;
  for (CacheUnit& unit : units) {
    places.push_back({.group = unit.group, .pool = unit.pool});
    bytes.push_back(unit.unit.bytes);
    pools.push_back(unit.pool);
    described.push_back(std::move(unit.unit));
  }
  if (auto sound = check_units(files, described); !sound) return std::unexpected(sound.error());
  const auto is_share = [](double rate) { return rate >= 0 && rate <= 1; };
  if (!options.use_rates.empty() &&
      (options.use_rates.size() != described.size() || !std::ranges::all_of(options.use_rates, is_share))) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "use_rates: must have a number from 0 to 1 for each unit"));
  }
  auto placement = place_pools(bytes, pools, options.memory_bytes);
  if (!placement) return std::unexpected(placement.error());
  auto core = std::make_unique<UnitCacheCore>(engine, std::move(files), std::move(described),
                                              std::move(places), std::move(*placement), options);
  if (auto started = core->start(); !started) return std::unexpected(started.error());
  const CachePlacement& made = core->placement();
  log::info(log::Component::stream, "caching {} units in {} slots of {} together", bytes.size(),
            std::accumulate(made.slots.begin(), made.slots.end(), std::size_t{0}),
            format_bytes(made.memory_bytes));
  return UnitCache(std::move(core));
}

UnitCache::UnitCache(std::unique_ptr<UnitCacheCore> core) : core_(std::move(core)) {}
UnitCache::UnitCache(UnitCache&&) noexcept = default;
UnitCache& UnitCache::operator=(UnitCache&&) noexcept = default;
UnitCache::~UnitCache() = default;

Status UnitCache::request(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens,
                          std::span<const std::size_t> expected) {
  return core_->request(group, uses, tokens, expected);
}

Result<UnitCache::Acquired> UnitCache::acquire(std::span<const std::size_t> units,
                                               std::optional<std::chrono::nanoseconds> timeout) {
  return core_->acquire(units, timeout);
}

Status UnitCache::release(std::size_t unit) { return core_->release(unit); }

const MemoryView& UnitCache::memory() const { return core_->memory(); }

const CachePlacement& UnitCache::placement() const { return core_->placement(); }

UnitCacheStats UnitCache::stats() const { return core_->stats(); }

std::vector<UnitGroupStats> UnitCache::group_stats() const { return core_->group_stats(); }

std::vector<double> UnitCache::use_rates() const { return core_->use_rates(); }

}  // namespace trunkline
