#include "stream/unit_cache_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/invalid_argument.h"

namespace trunkline {

UnitCacheCore::UnitCacheCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                             std::vector<CacheSchedule::Place> places, CachePlacement placement,
                             const UnitCacheOptions& options)
    : source_(engine, std::move(files), std::move(units), options.verify),
      places_(std::move(places)),
      placement_(std::move(placement)),
      schedule_(places_, placement_.slots, std::max<std::size_t>(options.read_ahead, 1)),
      loader_(source_, mutex_, changed_, [this](UnitFrame& slot) { read_ended(slot); }) {
  for (const auto& [group, pool] : places_) group_stats_.resize(std::max(group_stats_.size(), group + 1));
  if (!options.use_rates.empty()) schedule_.restore_use_rates(options.use_rates);
}

Status UnitCacheCore::start() {
  if (auto begun = source_.begin(); !begun) return begun;
  auto buffer = Buffer::allocate_pageable(placement_.memory_bytes);
  if (!buffer) return std::unexpected(buffer.error());
  buffer_ = std::move(*buffer);
  memory_ = buffer_.span();
  std::byte* at = buffer_.data();
  for (std::size_t pool = 0; pool < placement_.slots.size(); ++pool) {
    for (std::size_t slot = 0; slot < placement_.slots[pool]; ++slot) {
      slots_.emplace_back().data = at;
      at += placement_.slot_bytes[pool];
    }
  }
  return {};
}

UnitCacheStats UnitCacheCore::stats() const {
  const std::scoped_lock lock(mutex_);
  UnitCacheStats stats = stats_;
  loader_.stats().copy_to(stats);
  return stats;
}

std::vector<UnitGroupStats> UnitCacheCore::group_stats() const {
  const std::scoped_lock lock(mutex_);
  return group_stats_;
}

std::vector<double> UnitCacheCore::use_rates() const {
  const std::scoped_lock lock(mutex_);
  return schedule_.use_rates();
}

UnitFrame* UnitCacheCore::slot_of(std::size_t unit) {
  const std::size_t slot = schedule_.slot_of(unit);
  return slot == kNone ? nullptr : &slots_[slot];
}

// Reports to the schedule whether the slot may be given to another unit; call it after every change of state.
void UnitCacheCore::update(UnitFrame& slot) {
  const bool is_idle =
      slot.state == State::empty || slot.state == State::ready || slot.state == State::failed;
  schedule_.set_in_use(static_cast<std::size_t>(&slot - slots_.data()), !is_idle || slot.waiters > 0);
}

Status UnitCacheCore::request(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens,
                              std::span<const std::size_t> expected) {
  if (group >= group_stats_.size())
    return invalid_argument(fmt::format("group: {} of {}", group, group_stats_.size()));
  for (const UnitUse& use : uses) {
    if (auto known = source_.check_unit(use.unit); !known) return known;
    if (places_[use.unit].group != group) {
      return invalid_argument(
          fmt::format("uses: {} is not in group {}", source_.units()[use.unit].name, group));
    }
  }
  for (const std::size_t unit : expected) {
    if (auto known = source_.check_unit(unit); !known) return known;
  }
  Lock lock(mutex_);
  ++stats_.requests;
  UnitGroupStats& of_group = group_stats_[group];
  ++of_group.requests;
  for (const UnitUse& use : uses) {
    UnitFrame* slot = slot_of(use.unit);
    if (slot != nullptr && slot->state == State::failed && slot->waiters == 0) {
      empty(*slot);  // of a read that nobody waited for: it is tried again
      slot = nullptr;
    }
    ++(slot != nullptr ? stats_.hits : stats_.misses);
    ++(slot != nullptr ? of_group.hits : of_group.misses);
  }
  schedule_.request(group, uses, tokens, expected);
  read_ahead(lock);
  return {};
}

// Starts reading what the request needs next, as far as there is room.
void UnitCacheCore::read_ahead(Lock& lock) {
  std::vector<UnitFrame*> assigned;
  while (const auto next = schedule_.next()) assigned.push_back(assign(*next));
  if (!assigned.empty()) loader_.read(lock, assigned);
}

UnitFrame* UnitCacheCore::assign(const CacheSchedule::Read& read) {
  UnitFrame& slot = slots_[read.slot];
  if (read.evicted != kNone) {
    ++stats_.evictions;
    ++group_stats_[places_[read.evicted].group].evictions;
  }
  loader_.assign(slot, read.unit);
  update(slot);
  return &slot;
}

void UnitCacheCore::read_ended(UnitFrame& slot) {
  update(slot);
  if (slot.error) return;
  UnitGroupStats& of_group = group_stats_[places_[slot.unit].group];
  ++of_group.units_read;
  of_group.bytes_read += stored_bytes(source_.units()[slot.unit]);
}

void UnitCacheCore::empty(UnitFrame& slot) {
  slot.clear();
  update(slot);
  schedule_.vacate(static_cast<std::size_t>(&slot - slots_.data()));
}

// After an error: what was read with it came from the same storage, perhaps before the cause was removed.
void UnitCacheCore::drop_unchecked() {
  for (UnitFrame& slot : slots_) {
    const bool has_failed = slot.state == State::failed;
    if ((has_failed || (slot.state == State::ready && !slot.is_checked)) && slot.waiters == 0) empty(slot);
  }
}

// The slot of the first of the units that can be handed out, or whose error can.
UnitFrame* UnitCacheCore::available(std::span<const std::size_t> units) {
  for (const std::size_t unit : units) {
    UnitFrame* slot = slot_of(unit);
    if (slot != nullptr && slot->has_arrived()) return slot;
  }
  return nullptr;
}

// Makes sure that one of the units is on its way: reads the first one, if it has to.
Status UnitCacheCore::bring(Lock& lock, std::span<const std::size_t> units) {
  read_ahead(lock);
  if (std::ranges::any_of(units, [&](std::size_t unit) { return slot_of(unit) != nullptr; })) return {};
  const std::size_t unit = units.front();
  if (const auto read_now = schedule_.read_now(unit)) {
    UnitFrame* const assigned[] = {assign(*read_now)};
    loader_.read(lock, assigned);
    return {};
  }
  const std::size_t pool = places_[unit].pool;
  std::size_t first = 0;
  for (std::size_t before = 0; before < pool; ++before) first += placement_.slots[before];
  const auto slots = std::span(slots_).subspan(first, placement_.slots[pool]);
  if (!std::ranges::all_of(slots, [](const UnitFrame& slot) { return slot.state == State::held; })) return {};
  return invalid_argument(
      fmt::format("units: {} needs a slot, but each of the {} of its pool holds an acquired unit; "
                  "release one first",
                  source_.units()[unit].name, placement_.slots[pool]));
}

// Waits until something has changed, and keeps the units' slots meanwhile. False once the timeout has passed.
bool UnitCacheCore::wait(Lock& lock, std::span<const std::size_t> units, UnitWait& waiting) {
  std::vector<UnitFrame*> kept;
  for (const std::size_t unit : units) {
    UnitFrame* slot = slot_of(unit);
    if (slot == nullptr) continue;
    kept.push_back(slot);
    ++slot->waiters;
    update(*slot);
  }
  const bool in_time = waiting.wait(lock);
  for (UnitFrame* slot : kept) {
    --slot->waiters;
    update(*slot);
  }
  return in_time;
}

Result<UnitCache::Acquired> UnitCacheCore::acquire(std::span<const std::size_t> units,
                                                   std::optional<std::chrono::nanoseconds> timeout) {
  if (units.empty()) return invalid_argument("units: there are none");
  for (const std::size_t unit : units) {
    if (auto known = source_.check_unit(unit); !known) return std::unexpected(known.error());
  }
  UnitWait waiting(changed_, loader_.counts(), source_.units()[units.front()].name, timeout);
  Lock lock(mutex_);
  while (true) {
    if (UnitFrame* slot = available(units)) {
      waiting.end();
      return take(lock, *slot);
    }
    Status brought = bring(lock, units);
    if (brought && available(units) != nullptr) continue;  // it has arrived while it was being submitted
    const bool in_time = brought && wait(lock, units, waiting);
    if (in_time) continue;
    waiting.end();
    return std::unexpected(brought ? waiting.timed_out() : brought.error());
  }
}

// Hands out a unit that has arrived, once its checksums are verified.
Result<UnitCache::Acquired> UnitCacheCore::take(Lock& lock, UnitFrame& slot) {
  const std::size_t unit = slot.unit;
  if (slot.error) {
    Error error = std::move(*slot.error);
    empty(slot);
    drop_unchecked();
    changed_.notify_all();
    return std::unexpected(std::move(error));
  }
  if (slot.state == State::ready && !slot.is_checked) {
    slot.state = State::checking;
    update(slot);
    if (Status good = loader_.verify(lock, slot); !good) {
      empty(slot);
      drop_unchecked();
      return std::unexpected(good.error());
    }
  }
  slot.state = State::held;
  update(slot);
  ++slot.holders;
  ++loader_.counts().acquired;
  return UnitCache::Acquired{unit, {slot.data, source_.units()[unit].bytes}};
}

Status UnitCacheCore::release(std::size_t unit) {
  if (auto known = source_.check_unit(unit); !known) return known;
  Lock lock(mutex_);
  UnitFrame* slot = slot_of(unit);
  if (slot == nullptr || slot->state != State::held)
    return invalid_argument(fmt::format("unit: {} is not acquired", source_.units()[unit].name));
  if (--slot->holders > 0) return {};
  slot->state = State::ready;
  update(*slot);
  schedule_.finish(unit);
  changed_.notify_all();
  read_ahead(lock);
  return {};
}

}  // namespace trunkline
