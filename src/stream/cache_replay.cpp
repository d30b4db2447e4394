#include "stream/cache_replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "base/invalid_argument.h"

namespace trunkline {
namespace {

constexpr std::size_t kNone = CacheSchedule::kNone;

Status check(std::span<const ReplayModule> modules, std::span<const ReplayStep> steps) {
  for (std::size_t index = 0; index < steps.size(); ++index) {
    const ReplayStep& step = steps[index];
    if (step.module >= modules.size())
      return invalid_argument(
          fmt::format("steps: {} is of module {} of {}", index, step.module, modules.size()));
    for (const UnitUse& use : step.uses) {
      if (use.unit < modules[step.module].experts) continue;
      return invalid_argument(
          fmt::format("steps: {} uses expert {} of {}", index, use.unit, modules[step.module].experts));
    }
  }
  return {};
}

// Drives a schedule as a module does that computes with one matrix after the other: with each of its experts
// when it is in memory, those first that are there already.
class ScheduleDriver {
 public:
  ScheduleDriver(CacheSchedule& schedule, std::span<const CacheSchedule::Place> places, std::size_t pools)
      : schedule_(schedule), places_(places), counts_{.units_read = std::vector<std::uint64_t>(pools)} {}

  void begin(std::span<const UnitUse> uses) {
    ++counts_.steps;
    for (const UnitUse& use : uses) ++(schedule_.slot_of(use.unit) != kNone ? counts_.hits : counts_.misses);
  }

  void use(std::vector<UnitUse> units) {
    while (!units.empty()) {
      while (const auto read = schedule_.next()) count(*read);
      auto ready = std::ranges::find_if(
          units, [&](const UnitUse& use) { return schedule_.slot_of(use.unit) != kNone; });
      if (ready == units.end()) {
        ready = units.begin();
        if (const auto read = schedule_.read_now(ready->unit)) count(*read);
      }
      schedule_.finish(ready->unit);
      units.erase(ready);
    }
    while (const auto read = schedule_.next()) count(*read);
  }

  ReplayCounts counts() {
    return std::exchange(counts_, {.units_read = std::vector<std::uint64_t>(counts_.units_read.size())});
  }

 private:
  void count(const CacheSchedule::Read& read) {
    ++counts_.units_read[places_[read.unit].pool];
    if (read.evicted != kNone) ++counts_.evictions;
  }

  CacheSchedule& schedule_;
  std::span<const CacheSchedule::Place> places_;
  ReplayCounts counts_;
};

void add(ReplayCounts& sum, const ReplayCounts& more) {
  sum.steps += more.steps;
  sum.hits += more.hits;
  sum.misses += more.misses;
  sum.evictions += more.evictions;
  for (std::size_t pool = 0; pool < more.units_read.size(); ++pool)
    sum.units_read[pool] += more.units_read[pool];
}

}  // namespace

Result<CacheReplay> CacheReplay::create(std::vector<ReplayModule> modules, std::vector<ReplayStep> steps) {
  if (auto sound = check(modules, steps); !sound) return std::unexpected(sound.error());
  return CacheReplay(std::move(modules), std::move(steps));
}

CacheReplay::CacheReplay(std::vector<ReplayModule> modules, std::vector<ReplayStep> steps)
    : modules_(std::move(modules)), steps_(std::move(steps)) {
  for (std::size_t module = 0; module < modules_.size(); ++module) {
    firsts_.push_back(places_.size());
    for (const std::size_t pool : modules_[module].pools) {
      places_.insert(places_.end(), modules_[module].experts, {.group = module, .pool = pool});
      pools_ = std::max(pools_, pool + 1);
    }
  }
  std::vector<bool> was_used(places_.size());
  for (const ReplayStep& step : steps_) {
    for (const UnitUse& use : units_of(step)) {
      ++uses_;
      if (was_used[use.unit]) continue;
      was_used[use.unit] = true;
      ++used_units_;
    }
  }
}

std::vector<UnitUse> CacheReplay::units_of(const ReplayStep& step, std::size_t matrix) const {
  std::vector<UnitUse> units = step.uses;
  for (UnitUse& use : units) use.unit += firsts_[step.module] + matrix * modules_[step.module].experts;
  return units;
}

std::vector<UnitUse> CacheReplay::units_of(const ReplayStep& step) const {
  std::vector<UnitUse> units;
  for (std::size_t matrix = 0; matrix < modules_[step.module].pools.size(); ++matrix) {
    const std::vector<UnitUse> of_matrix = units_of(step, matrix);
    units.insert(units.end(), of_matrix.begin(), of_matrix.end());
  }
  return units;
}

std::vector<std::size_t> CacheReplay::all_units_of(std::size_t module) const {
  std::vector<std::size_t> units(modules_[module].experts * modules_[module].pools.size());
  std::iota(units.begin(), units.end(), firsts_[module]);
  return units;
}

CacheReplay::Replayed CacheReplay::replay(std::span<const std::size_t> slots, std::size_t read_ahead,
                                          std::uint64_t tokens) const {
  CacheSchedule schedule(places_, slots, read_ahead);
  ScheduleDriver driver(schedule, places_, pools_);
  Replayed replayed{.all = driver.counts(), .counted = driver.counts()};
  for (const ReplayStep& step : steps_) {
    const std::vector<UnitUse> uses = units_of(step);
    driver.begin(uses);
    std::vector<std::size_t> expected;
    if (step.expects_next) expected = all_units_of((step.module + 1) % modules_.size());
    schedule.request(step.module, uses, step.tokens, expected);
    for (std::size_t matrix = 0; matrix < modules_[step.module].pools.size(); ++matrix)
      driver.use(units_of(step, matrix));
    const ReplayCounts of_step = driver.counts();
    add(replayed.all, of_step);
    if (step.tokens == tokens) add(replayed.counted, of_step);
  }
  return replayed;
}

std::uint64_t CacheReplay::lru_hits(std::span<const std::size_t> slots) const {
  return ranked_hits(slots, false);
}

std::uint64_t CacheReplay::lfu_hits(std::span<const std::size_t> slots) const {
  return ranked_hits(slots, true);
}

std::uint64_t CacheReplay::ranked_hits(std::span<const std::size_t> slots, bool by_count) const {
  using Rank = std::tuple<std::uint64_t, std::uint64_t, std::size_t>;  // uses, time of the last one, unit
  std::vector<std::set<Rank>> cached(slots.size());                    // of each pool
  std::vector<Rank> ranks(places_.size());
  std::vector<std::uint64_t> last_step(places_.size());
  std::uint64_t hits = 0;
  std::uint64_t now = 0;
  std::uint64_t number = 0;
  for (const ReplayStep& step : steps_) {
    ++number;
    const std::vector<UnitUse> uses = units_of(step);
    for (const auto& [unit, tokens] : uses) {
      last_step[unit] = number;
      hits += cached[places_[unit].pool].contains(ranks[unit]) ? 1U : 0U;
    }
    for (const auto& [unit, tokens] : uses) {
      std::set<Rank>& pool = cached[places_[unit].pool];
      const bool was_cached = pool.erase(ranks[unit]) > 0;
      ranks[unit] = {by_count ? std::get<0>(ranks[unit]) + 1 : 0, ++now, unit};
      if (!was_cached && pool.size() == slots[places_[unit].pool]) {
        const auto found = std::ranges::find_if(
            pool, [&](const Rank& rank) { return last_step[std::get<2>(rank)] != number; });
        pool.erase(found == pool.end() ? pool.begin() : found);
      }
      pool.insert(ranks[unit]);
    }
  }
  return hits;
}

std::uint64_t CacheReplay::static_hits(std::span<const std::size_t> slots, std::size_t for_misses) const {
  std::vector<std::uint64_t> first_half(places_.size());
  std::vector<std::uint64_t> all(places_.size());
  for (std::size_t index = 0; index < steps_.size(); ++index) {
    for (const UnitUse& use : units_of(steps_[index])) {
      ++all[use.unit];
      if (index < steps_.size() / 2) ++first_half[use.unit];
    }
  }
  std::vector<std::vector<std::size_t>> ranked(slots.size());
  for (std::size_t unit = 0; unit < places_.size(); ++unit) ranked[places_[unit].pool].push_back(unit);
  std::uint64_t hits = 0;
  for (std::size_t pool = 0; pool < slots.size(); ++pool) {
    std::vector<std::size_t>& units = ranked[pool];
    std::ranges::sort(units, [&](std::size_t one, std::size_t other) {
      return first_half[one] != first_half[other] ? first_half[one] > first_half[other] : one < other;
    });
    if (slots[pool] < units.size()) units.resize(slots[pool] - std::min(slots[pool], for_misses));
    for (const std::size_t unit : units) hits += all[unit];
  }
  return hits;
}

}  // namespace trunkline
