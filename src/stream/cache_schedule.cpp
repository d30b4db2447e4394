#include "stream/cache_schedule.h"

#include <algorithm>
#include <utility>

namespace trunkline {
namespace {

// How much more a unit is worth whose group comes next than one whose group has just had its turn.
constexpr double kNearness = 0.1;

std::vector<std::size_t> groups_of(std::span<const CacheSchedule::Place> units) {
  std::vector<std::size_t> groups;
  for (const CacheSchedule::Place& unit : units) groups.push_back(unit.group);
  return groups;
}

}  // namespace

CacheSchedule::CacheSchedule(std::span<const Place> units, std::span<const std::size_t> slots,
                             std::size_t read_ahead)
    : units_(units.begin(), units.end()),
      read_ahead_(read_ahead),
      rates_(groups_of(units)),
      slot_of_(units.size(), kNone),
      position_(units.size(), kNone),
      was_read_(units.size()) {
  for (const Place& unit : units_) last_request_.resize(std::max(last_request_.size(), unit.group + 1));
  for (const std::size_t count : slots) {
    pools_.push_back({.first_slot = slots_.size(), .slots = count, .wanted = {}});
    slots_.resize(slots_.size() + count);
  }
}

void CacheSchedule::request(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens,
                            std::span<const std::size_t> expected) {
  for (const std::size_t unit : requested_) {
    position_[unit] = kNone;
    was_read_[unit] = false;
  }
  requested_.clear();
  for (Pool& pool : pools_) {
    pool.wanted.clear();
    pool.next = pool.ahead = 0;
  }
  const auto want = [this](std::size_t unit) {
    if (position_[unit] != kNone) return;
    position_[unit] = requested_.size();
    requested_.push_back(unit);
    pools_[units_[unit].pool].wanted.push_back(unit);
  };
  for (const UnitUse& use : uses) want(use.unit);
  for (const std::size_t unit : expected) want(unit);
  rates_.record(group, uses, tokens);
  last_request_[group] = ++requests_;
}

void CacheSchedule::finish(std::size_t unit) {
  position_[unit] = kNone;
  if (!was_read_[unit]) return;
  was_read_[unit] = false;
  --pools_[units_[unit].pool].ahead;
}

std::optional<CacheSchedule::Read> CacheSchedule::next() {
  for (Pool& pool : pools_) {
    if (auto read = next_of(pool)) return read;
  }
  return std::nullopt;
}

std::optional<CacheSchedule::Read> CacheSchedule::next_of(Pool& pool) {
  while (pool.next < pool.wanted.size()) {
    const std::size_t unit = pool.wanted[pool.next];
    if (slot_of_[unit] == kNone && is_wanted(unit)) break;
    ++pool.next;
  }
  if (pool.next == pool.wanted.size() || pool.ahead >= read_ahead_) return std::nullopt;
  const std::size_t slot = slot_for(pool, false);
  if (slot == kNone) return std::nullopt;
  return assign(pool.wanted[pool.next++], slot);
}

std::optional<CacheSchedule::Read> CacheSchedule::read_now(std::size_t unit) {
  const std::size_t slot = slot_for(pools_[units_[unit].pool], true);
  if (slot == kNone) return std::nullopt;
  return assign(unit, slot);
}

// The probability that the unit is used when its group comes next. Groups take turns, so the one whose last
// request is longest ago comes first. Of units with about the same rate those that come later go: otherwise
// steps that use most units of all groups would evict what they need next.
double CacheSchedule::value(std::size_t unit) const {
  const auto turns = static_cast<double>(requests_ - last_request_[units_[unit].group]);
  const double nearness = std::min(1.0, turns / static_cast<double>(last_request_.size()));
  return rates_.rate(unit) * (1 + kNearness * nearness);
}

// An empty slot; else that of the unit with the lowest value which the request does not need; else, if it may
// be evicted, of the unit that the request needs last. kNone if there is none.
std::size_t CacheSchedule::slot_for(const Pool& pool, bool may_evict_wanted) const {
  std::size_t lowest = kNone;
  std::size_t last = kNone;
  double lowest_value = 0;
  for (std::size_t slot = pool.first_slot; slot < pool.first_slot + pool.slots; ++slot) {
    const auto& [unit, in_use] = slots_[slot];
    if (in_use) continue;
    if (unit == kNone) return slot;
    if (is_wanted(unit)) {
      if (last == kNone || position_[unit] > position_[slots_[last].unit]) last = slot;
      continue;
    }
    // No unit is worth less than its rate, which takes less to know than its value.
    if (lowest != kNone && rates_.rate(unit) >= lowest_value) continue;
    const double of_unit = value(unit);
    if (lowest != kNone && of_unit >= lowest_value) continue;
    lowest = slot;
    lowest_value = of_unit;
  }
  return lowest == kNone && may_evict_wanted ? last : lowest;
}

CacheSchedule::Read CacheSchedule::assign(std::size_t unit, std::size_t slot) {
  const std::size_t evicted = std::exchange(slots_[slot].unit, unit);
  slot_of_[unit] = slot;
  Pool& pool = pools_[units_[unit].pool];
  if (evicted != kNone) {
    slot_of_[evicted] = kNone;
    if (was_read_[evicted]) {
      was_read_[evicted] = false;
      --pool.ahead;
    }
    // If the request still needs it, it is read again.
    if (is_wanted(evicted)) pool.next = 0;
  }
  if (is_wanted(unit)) {
    was_read_[unit] = true;
    ++pool.ahead;
  }
  return {unit, slot, evicted};
}

void CacheSchedule::vacate(std::size_t slot) {
  const std::size_t unit = std::exchange(slots_[slot].unit, kNone);
  if (unit == kNone) return;
  slot_of_[unit] = kNone;
  if (!was_read_[unit]) return;
  was_read_[unit] = false;
  --pools_[units_[unit].pool].ahead;
}

}  // namespace trunkline
