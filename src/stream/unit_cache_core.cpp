#include "stream/unit_cache_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/invalid_argument.h"
#include "base/log.h"
#include "base/waits.h"
#include "io/engine_core.h"
#include "stream/stream_trace.h"

namespace trunkline {
UnitCacheCore::UnitCacheCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                             std::vector<CacheSchedule::Place> places, CachePlacement placement,
                             const UnitCacheOptions& options)
    : source_(engine, std::move(files), std::move(units), options.verify),
      places_(std::move(places)),
      placement_(std::move(placement)),
      schedule_(places_, placement_.slots, std::max<std::size_t>(options.read_ahead, 1)),
      checked_(places_.size()) {
  for (const auto& [group, pool] : places_) group_stats_.resize(std::max(group_stats_.size(), group + 1));
  if (!options.use_rates.empty()) schedule_.restore_use_rates(options.use_rates);
}

UnitCacheCore::~UnitCacheCore() {
  // In a forked child, what the parent's threads were doing never ends.
  if (source_.engine().core()->belongs_to_parent()) return;
  std::vector<Future> futures;
  Lock lock(mutex_);
  for (const Slot& slot : slots_) {
    if (slot.state == State::reading) futures.insert(futures.end(), slot.futures.begin(), slot.futures.end());
  }
  lock.unlock();
  for (Future& future : futures) future.cancel();
  lock.lock();
  changed_.wait(lock, [&] { return under_way_ == 0; });
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
  if (reading_ > 0) stats.read_ns += ns_since(reading_since_);
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

Status UnitCacheCore::check_unit(std::size_t unit) const {
  if (unit < places_.size()) return {};
  return invalid_argument(fmt::format("unit: {} of {}", unit, places_.size()));
}

UnitCacheCore::Slot* UnitCacheCore::slot_of(std::size_t unit) {
  const std::size_t slot = schedule_.slot_of(unit);
  return slot == kNone ? nullptr : &slots_[slot];
}

// Reports to the schedule whether the slot may be given to another unit; call it after every change of state.
void UnitCacheCore::update(Slot& slot) {
  const bool is_idle =
      slot.state == State::empty || slot.state == State::ready || slot.state == State::failed;
  schedule_.set_in_use(static_cast<std::size_t>(&slot - slots_.data()), !is_idle || slot.waiters > 0);
}

Status UnitCacheCore::request(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens,
                              std::span<const std::size_t> expected) {
  if (group >= group_stats_.size())
    return invalid_argument(fmt::format("group: {} of {}", group, group_stats_.size()));
  for (const UnitUse& use : uses) {
    if (auto known = check_unit(use.unit); !known) return known;
    if (places_[use.unit].group != group) {
      return invalid_argument(
          fmt::format("uses: {} is not in group {}", source_.units()[use.unit].name, group));
    }
  }
  for (const std::size_t unit : expected) {
    if (auto known = check_unit(unit); !known) return known;
  }
  Lock lock(mutex_);
  ++stats_.requests;
  UnitGroupStats& of_group = group_stats_[group];
  ++of_group.requests;
  for (const UnitUse& use : uses) {
    Slot* slot = slot_of(use.unit);
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
  std::vector<CacheSchedule::Read> reads;
  while (const auto next = schedule_.next()) {
    assign(*next);
    reads.push_back(*next);
  }
  if (!reads.empty()) read(lock, reads);
}

void UnitCacheCore::assign(const CacheSchedule::Read& read) {
  Slot& slot = slots_[read.slot];
  if (read.evicted != kNone) {
    ++stats_.evictions;
    ++group_stats_[places_[read.evicted].group].evictions;
  }
  slot.unit = read.unit;
  slot.state = State::reading;
  slot.is_checked = false;
  slot.pending = source_.units()[read.unit].parts.size() + 1;  // one for the submission
  slot.error.reset();
  slot.futures.clear();
  slot.trace_start_ns = trace::start();
  slot.trace_caller = trace::this_thread();
  update(slot);
  ++under_way_;
  if (reading_++ == 0) reading_since_ = Clock::now();
}

// Submits the reads of units that have been assigned to slots, all at once.
void UnitCacheCore::read(Lock& lock, std::span<const CacheSchedule::Read> reads) {
  lock.unlock();
  std::vector<Result<std::uint64_t>> versions;
  std::vector<Request> requests;
  for (const auto& [unit, slot, evicted] : reads) {
    versions.push_back(source_.version_of(unit));
    if (versions.back()) source_.add_reads(unit, slots_[slot].data, requests);
  }
  std::vector<Future> futures;
  if (!requests.empty()) futures = source_.engine().submit(requests);

  lock.lock();
  std::size_t at = 0;
  for (std::size_t index = 0; index < reads.size(); ++index) {
    Slot& slot = slots_[reads[index].slot];
    const std::size_t parts = slot.pending - 1;
    if (versions[index]) {
      slot.file_version = *versions[index];
      slot.futures.assign(futures.begin() + static_cast<std::ptrdiff_t>(at),
                          futures.begin() + static_cast<std::ptrdiff_t>(at + parts));
      at += parts;
    } else {
      slot.error = versions[index].error();
      slot.pending = 1;
    }
  }
  lock.unlock();
  at = 0;
  for (std::size_t index = 0; index < reads.size(); ++index) {
    if (!versions[index]) continue;
    Slot& slot = slots_[reads[index].slot];
    for (std::size_t part = source_.units()[reads[index].unit].parts.size(); part > 0; --part) {
      Future& future = futures[at++];
      future.on_done([this, &slot, future] {
        const std::scoped_lock guard(mutex_);
        arrived(slot, future.result());
      });
    }
  }
  lock.lock();
  for (const CacheSchedule::Read& read : reads) arrived(slots_[read.slot], 0);
}

// Called for each part, and once for the submission.
void UnitCacheCore::arrived(Slot& slot, const Result<std::uint64_t>& result) {
  if (!result && !slot.error) slot.error = result.error();
  if (--slot.pending > 0) return;
  slot.futures.clear();
  const StreamUnit& unit = source_.units()[slot.unit];
  if (slot.trace_start_ns != 0) {
    trace::record({.kind = &kReadUnit,
                   .start_ns = slot.trace_start_ns,
                   .end_ns = trace::now(),
                   .caller = slot.trace_caller,
                   .text = trace::intern(unit.name),
                   .bytes = unit.bytes});
  }
  if (slot.error) {
    ++stats_.failed;
    slot.state = State::failed;
  } else {
    slot.state = State::ready;
    ++stats_.units_read;
    std::uint64_t bytes = 0;
    for (const StreamPart& part : unit.parts) bytes += part.bytes;
    stats_.bytes_read += bytes;
    UnitGroupStats& of_group = group_stats_[places_[slot.unit].group];
    ++of_group.units_read;
    of_group.bytes_read += bytes;
  }
  update(slot);
  if (--reading_ == 0) stats_.read_ns += ns_since(reading_since_);
  --under_way_;
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

void UnitCacheCore::empty(Slot& slot) {
  slot.unit = kNone;
  slot.state = State::empty;
  slot.error.reset();
  update(slot);
  schedule_.vacate(static_cast<std::size_t>(&slot - slots_.data()));
}

// After an error: what was read with it came from the same storage, perhaps before the cause was removed.
void UnitCacheCore::drop_unchecked() {
  for (Slot& slot : slots_) {
    const bool has_failed = slot.state == State::failed;
    if ((has_failed || (slot.state == State::ready && !slot.is_checked)) && slot.waiters == 0) empty(slot);
  }
}

// The slot of the first of the units that can be handed out, or whose error can.
UnitCacheCore::Slot* UnitCacheCore::available(std::span<const std::size_t> units) {
  for (const std::size_t unit : units) {
    Slot* slot = slot_of(unit);
    if (slot != nullptr &&
        (slot->state == State::ready || slot->state == State::held || slot->state == State::failed))
      return slot;
  }
  return nullptr;
}

// Makes sure that one of the units is on its way: reads the first one, if it has to.
Status UnitCacheCore::bring(Lock& lock, std::span<const std::size_t> units) {
  read_ahead(lock);
  if (std::ranges::any_of(units, [&](std::size_t unit) { return slot_of(unit) != nullptr; })) return {};
  const std::size_t unit = units.front();
  if (const auto read_now = schedule_.read_now(unit)) {
    assign(*read_now);
    read(lock, {&*read_now, 1});
    return {};
  }
  const std::size_t pool = places_[unit].pool;
  std::size_t first = 0;
  for (std::size_t before = 0; before < pool; ++before) first += placement_.slots[before];
  const auto slots = std::span(slots_).subspan(first, placement_.slots[pool]);
  if (!std::ranges::all_of(slots, [](const Slot& slot) { return slot.state == State::held; })) return {};
  return invalid_argument(
      fmt::format("units: {} needs a slot, but each of the {} of its pool holds an acquired unit; "
                  "release one first",
                  source_.units()[unit].name, placement_.slots[pool]));
}

// Waits until something has changed, and keeps the units' slots meanwhile. False once the deadline has
// passed.
bool UnitCacheCore::wait_for(Lock& lock, std::span<const std::size_t> units,
                             const std::optional<Clock::time_point>& deadline, Waiting& waiting) {
  if (!waiting.since) {
    waiting.since = Clock::now();
    waiting.span.emplace(kUnitWait, source_.units()[units.front()].name);
    ++stats_.waited;
  }
  std::vector<Slot*> kept;
  for (const std::size_t unit : units) {
    Slot* slot = slot_of(unit);
    if (slot == nullptr) continue;
    kept.push_back(slot);
    ++slot->waiters;
    update(*slot);
  }
  bool in_time = true;
  if (deadline) {
    in_time = changed_.wait_until(lock, *deadline) == std::cv_status::no_timeout;
  } else {
    changed_.wait(lock);
  }
  for (Slot* slot : kept) {
    --slot->waiters;
    update(*slot);
  }
  return in_time;
}

void UnitCacheCore::stop_waiting(Waiting& waiting, const std::string& name) {
  waiting.span.reset();
  if (!waiting.since) return;
  const std::uint64_t waited_ns = ns_since(*waiting.since);
  waiting.since.reset();
  stats_.wait_ns += waited_ns;
  if (waited_ns < kLongWaitNs) return;
  log::info(log::Component::stream, "waited {:.1f} s for {} to be read", static_cast<double>(waited_ns) / 1e9,
            name);
}

Result<UnitCache::Acquired> UnitCacheCore::acquire(std::span<const std::size_t> units,
                                                   std::optional<std::chrono::nanoseconds> timeout) {
  if (units.empty()) return invalid_argument("units: there are none");
  for (const std::size_t unit : units) {
    if (auto known = check_unit(unit); !known) return std::unexpected(known.error());
  }
  std::optional<Clock::time_point> deadline;
  if (timeout) deadline = Clock::now() + *timeout;
  Waiting waiting;
  const std::string& name = source_.units()[units.front()].name;
  Lock lock(mutex_);
  while (true) {
    if (Slot* slot = available(units)) {
      stop_waiting(waiting, name);
      return take(lock, *slot);
    }
    Status brought = bring(lock, units);
    if (brought && available(units) != nullptr) continue;  // it has arrived while it was being submitted
    const bool in_time = brought && wait_for(lock, units, deadline, waiting);
    if (in_time) continue;
    stop_waiting(waiting, name);
    if (!brought) return std::unexpected(brought.error());
    return std::unexpected(make_error(ErrorKind::timed_out, fmt::format("{} has not arrived yet", name)));
  }
}

// Hands out a unit that has arrived, once its checksums are verified.
Result<UnitCache::Acquired> UnitCacheCore::take(Lock& lock, Slot& slot) {
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
    lock.unlock();
    const auto started = Clock::now();
    const Status good = check(slot);
    const std::uint64_t spent = ns_since(started);
    lock.lock();
    stats_.verify_ns += spent;
    changed_.notify_all();
    if (!good) {
      ++stats_.failed;
      empty(slot);
      drop_unchecked();
      return std::unexpected(good.error());
    }
    slot.is_checked = true;
    checked_[unit] = slot.file_version;
  }
  slot.state = State::held;
  update(slot);
  ++slot.holders;
  ++stats_.acquired;
  return UnitCache::Acquired{unit, {slot.data, source_.units()[unit].bytes}};
}

Status UnitCacheCore::check(const Slot& slot) {
  if (source_.verify() == StreamVerify::never) return {};
  const auto file_version = source_.version_of(slot.unit);
  if (!file_version) return std::unexpected(file_version.error());
  if (source_.verify() == StreamVerify::once && checked_[slot.unit] == *file_version) return {};
  const StreamUnit& unit = source_.units()[slot.unit];
  const trace::Span span(kCheckUnit, unit.name, unit.bytes);
  return source_.check_sums(slot.unit, slot.data, *file_version);
}

Status UnitCacheCore::release(std::size_t unit) {
  if (auto known = check_unit(unit); !known) return known;
  Lock lock(mutex_);
  Slot* slot = slot_of(unit);
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
