#include "stream/stream_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "io/engine_core.h"
#include "stream/pages.h"
#include "trunkline/checksum.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

using Clock = std::chrono::steady_clock;

std::uint64_t since(Clock::time_point start) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

Error wrong(std::string message) { return make_error(ErrorKind::invalid_argument, std::move(message)); }

}  // namespace

StreamCore::StreamCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                       StreamPlacement placement, StreamVerify verify)
    : engine_(engine),
      files_(std::move(files)),
      units_(std::move(units)),
      placement_(std::move(placement)),
      verify_(verify),
      stamps_(files_),
      home_(units_.size(), kNone),
      at_(units_.size(), kNone),
      checked_(units_.size()) {}

StreamCore::~StreamCore() {
  // What the threads of a fork's parent were doing never ends here.
  if (engine_.core()->belongs_to_parent()) return;
  std::vector<Future> futures;
  Lock lock(mutex_);
  for (const Place& place : places_) {
    if (place.state == State::reading)
      futures.insert(futures.end(), place.futures.begin(), place.futures.end());
  }
  lock.unlock();
  for (Future& future : futures) future.cancel();
  lock.lock();
  changed_.wait(lock, [&] { return under_way_ == 0; });
}

Status StreamCore::start() {
  // Of all files, so that a change of one that is read later counts from now on.
  if (verify_ == StreamVerify::once) {
    if (auto begun = stamps_.begin(); !begun) return begun;
  }
  std::uint64_t resident_bytes = 0;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (placement_.resident[unit]) resident_bytes += whole_pages(units_[unit].bytes);
  }
  auto slots = engine_.allocate(placement_.slots * placement_.slot_bytes);
  if (!slots) return std::unexpected(slots.error());
  slots_ = std::move(*slots);
  auto resident = Buffer::allocate_pageable(resident_bytes);
  if (!resident) return std::unexpected(resident.error());
  resident_ = std::move(*resident);
  memory_ = {slots_.span(), resident_.span()};

  places_.resize(placement_.slots);
  for (std::size_t slot = 0; slot < placement_.slots; ++slot)
    places_[slot].data = slots_.data() + slot * placement_.slot_bytes;
  std::uint64_t at = 0;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (!placement_.resident[unit]) continue;
    home_[unit] = places_.size();
    places_.emplace_back().data = resident_.data() + at;
    at += whole_pages(units_[unit].bytes);
  }
  std::vector<std::size_t> order(units_.size());
  std::iota(order.begin(), order.end(), 0);
  return set_order(std::move(order));
}

Status StreamCore::set_order(std::vector<std::size_t> order) {
  std::vector<std::size_t> position(units_.size(), kNone);
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] < position.size()) position[order[i]] = i;
  }
  if (order.size() != units_.size() || std::ranges::find(position, kNone) != position.end())
    return std::unexpected(wrong(fmt::format("order: not each of the {} units once", units_.size())));
  Lock lock(mutex_);
  // Reading goes on behind what was to be read next.
  const std::size_t next = order_.empty() ? 0 : position[order_[next_]];
  order_ = std::move(order);
  position_ = std::move(position);
  next_ = next;
  passing_ = 0;
  rank_.assign(units_.size(), 0);
  for (const std::size_t unit : order_) {
    rank_[unit] = passing_;
    if (!placement_.resident[unit]) ++passing_;
  }
  read_ahead(lock);
  return {};
}

StreamStats StreamCore::stats() const {
  const std::scoped_lock lock(mutex_);
  StreamStats stats = stats_;
  if (reading_ > 0) stats.read_ns += since(reading_since_);
  return stats;
}

Status StreamCore::check_unit(std::size_t unit) const {
  if (unit < units_.size()) return {};
  return std::unexpected(wrong(fmt::format("unit: {} of {}", unit, units_.size())));
}

StreamCore::Place* StreamCore::place_of(std::size_t unit) {
  return at_[unit] == kNone ? nullptr : &places_[at_[unit]];
}

// Where the unit can be read to now, or null.
StreamCore::Place* StreamCore::room_for(std::size_t unit) {
  if (home_[unit] != kNone) return &places_[home_[unit]];
  const auto slots = std::span(places_).first(placement_.slots);
  const auto slot = std::ranges::find(slots, State::empty, &Place::state);
  return slot == slots.end() ? nullptr : &*slot;
}

// How many units through slots lie between two of them in the cycle.
std::size_t StreamCore::distance(std::size_t from, std::size_t to) const {
  return (rank_[to] + passing_ - rank_[from]) % passing_;
}

// Begins to read what comes next, as long as there is room.
void StreamCore::read_ahead(Lock& lock) {
  for (std::size_t passed = 0; passed < order_.size(); ++passed) {
    const std::size_t unit = order_[next_];
    if (place_of(unit) == nullptr) {
      Place* place = room_for(unit);
      if (place == nullptr) return;
      read(lock, *place, unit);
      passed = 0;  // others may have moved on meanwhile
      if (order_[next_] != unit) continue;
    }
    next_ = (next_ + 1) % order_.size();
  }
}

void StreamCore::read(Lock& lock, Place& place, std::size_t unit) {
  const std::vector<StreamPart>& parts = units_[unit].parts;
  const std::uint64_t reading = ++readings_;
  place.unit = unit;
  place.state = State::reading;
  place.given_up = false;
  place.pending = parts.size() + 1;  // one for the submitting
  place.reading = reading;
  place.error.reset();
  place.futures.clear();
  at_[unit] = place_index(place);
  ++under_way_;
  if (reading_++ == 0) reading_since_ = Clock::now();
  lock.unlock();

  const auto looked = look(units_[unit]);
  std::vector<Request> requests;
  for (const StreamPart& part : parts) {
    requests.push_back({.op = Op::read,
                        .file = &files_[part.file],
                        .memory = {place.data + part.at, part.bytes},
                        .offset = part.offset});
  }
  std::vector<Future> futures;
  if (looked) futures = engine_.submit(requests);

  lock.lock();
  if (place.reading == reading && place.state == State::reading) place.futures = futures;
  if (looked) {
    place.looked = *looked;
  } else {
    place.error = looked.error();
    place.pending -= parts.size();
  }
  lock.unlock();
  for (Future& future : futures) {
    future.on_done([this, &place, future] {
      const std::scoped_lock guard(mutex_);
      arrived(place, future.result());
    });
  }
  lock.lock();
  arrived(place, 0);
}

// Of one part, or of the submitting.
void StreamCore::arrived(Place& place, const Result<std::uint64_t>& result) {
  if (!result && !place.error) place.error = result.error();
  if (--place.pending > 0) return;
  place.futures.clear();
  if (place.error && !place.given_up) ++stats_.failed;
  if (place.given_up) {
    empty(place);
  } else if (place.error) {
    place.state = State::failed;
  } else {
    place.state = State::ready;
    ++stats_.units_read;
    for (const StreamPart& part : units_[place.unit].parts) stats_.bytes_read += part.bytes;
  }
  if (--reading_ == 0) stats_.read_ns += since(reading_since_);
  --under_way_;
  changed_.notify_all();  // under the lock: whoever waits may destroy this next
}

void StreamCore::empty(Place& place) {
  at_[place.unit] = kNone;
  place.unit = kNone;
  place.state = State::empty;
  place.given_up = false;
  place.error.reset();
}

// False when the deadline has passed.
bool StreamCore::wait(Lock& lock, const Deadline& deadline) {
  if (!deadline) {
    changed_.wait(lock);
    return true;
  }
  return changed_.wait_until(lock, *deadline) == std::cv_status::no_timeout;
}

Result<MemoryView> StreamCore::acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout) {
  if (auto known = check_unit(unit); !known) return std::unexpected(known.error());
  Deadline deadline;
  if (timeout) deadline = Clock::now() + *timeout;
  Lock lock(mutex_);
  std::optional<Clock::time_point> waiting;
  const auto stop_waiting = [&] {
    if (waiting) stats_.wait_ns += since(*std::exchange(waiting, std::nullopt));
  };
  while (true) {
    Place* place = place_of(unit);
    if (place == nullptr) {
      if (auto turned = turn_to(lock, unit); !turned) return std::unexpected(turned.error());
      place = place_of(unit);
    }
    if (place != nullptr &&
        (place->state == State::ready || place->state == State::held || place->state == State::failed)) {
      stop_waiting();
      return take(lock, *place);
    }
    if (!waiting) {
      waiting = Clock::now();
      ++stats_.waited;
    }
    if (place != nullptr) ++place->waiters;
    const bool in_time = wait(lock, deadline);
    if (place != nullptr) --place->waiters;
    if (!in_time) {
      stop_waiting();
      return std::unexpected(
          make_error(ErrorKind::timed_out, fmt::format("{} has not arrived yet", units_[unit].name)));
    }
  }
}

// Reads the unit next, which is not what was expected. What others wait for stays, and so does what is used
// soon after it, if there is room.
Status StreamCore::turn_to(Lock& lock, std::size_t unit) {
  if (home_[unit] != kNone) {
    read(lock, places_[home_[unit]], unit);
    return {};
  }
  const auto slots = std::span(places_).first(placement_.slots);
  if (std::ranges::all_of(slots, [](const Place& place) {
        return place.state == State::held || place.state == State::checking;
      })) {
    return std::unexpected(wrong(fmt::format(
        "unit: {} needs a slot, and each of the {} holds an acquired unit; release one before, or open the "
        "stream with more slots",
        units_[unit].name, placement_.slots)));
  }
  next_ = position_[unit];
  give_up_those_behind(lock, unit);
  make_room(lock, unit);
  read_ahead(lock);
  return {};
}

// Gives up what is not used soon after `unit`, so that its slots serve what is.
void StreamCore::give_up_those_behind(Lock& lock, std::size_t unit) {
  std::vector<Place*> behind;
  for (Place& place : std::span(places_).first(placement_.slots)) {
    if (may_give_up(place) && distance(unit, place.unit) >= placement_.slots) behind.push_back(&place);
  }
  give_up(lock, behind);
}

// Gives up what is used last, unless a slot is empty or will be.
void StreamCore::make_room(Lock& lock, std::size_t unit) {
  const auto slots = std::span(places_).first(placement_.slots);
  if (std::ranges::any_of(slots, [](const Place& place) {
        return place.state == State::empty || (place.state == State::reading && place.given_up);
      })) {
    return;
  }
  Place* last = nullptr;
  for (Place& place : slots) {
    if (!may_give_up(place)) continue;
    if (last == nullptr || distance(unit, place.unit) > distance(unit, last->unit)) last = &place;
  }
  if (last != nullptr) give_up(lock, {last});
}

bool StreamCore::may_give_up(const Place& place) {
  if (place.waiters > 0 || place.given_up) return false;
  return place.state == State::reading || place.state == State::ready || place.state == State::failed;
}

void StreamCore::give_up(Lock& lock, const std::vector<Place*>& places) {
  std::vector<Future> futures;
  for (Place* place : places) {
    ++stats_.unused;
    if (place->state == State::reading) {
      place->given_up = true;
      futures.insert(futures.end(), place->futures.begin(), place->futures.end());
    } else {
      empty(*place);
    }
  }
  if (futures.empty()) return;
  ++under_way_;
  lock.unlock();
  for (Future& future : futures) future.cancel();
  lock.lock();
  --under_way_;
  changed_.notify_all();
}

// After an error: what was read ahead came from the same storage, perhaps before its cause was gone.
void StreamCore::give_up_unchecked(Lock& lock) {
  std::vector<Place*> suspect;
  for (Place& place : places_) {
    if (may_give_up(place) && (is_slot(place) || !checked_[place.unit])) suspect.push_back(&place);
  }
  give_up(lock, suspect);
}

// Hands out what has arrived, once it is known to be good, and goes on reading ahead.
Result<MemoryView> StreamCore::take(Lock& lock, Place& place) {
  const std::size_t unit = place.unit;
  if (place.error) {
    Error error = std::move(*place.error);
    empty(place);
    give_up_unchecked(lock);
    changed_.notify_all();
    return std::unexpected(std::move(error));
  }
  if (place.state == State::ready) {
    place.state = State::checking;
    lock.unlock();
    const auto started = Clock::now();
    const Status good = check(place);
    const std::uint64_t spent = since(started);
    lock.lock();
    stats_.verify_ns += spent;
    changed_.notify_all();
    if (!good) {
      ++stats_.failed;
      empty(place);
      give_up_unchecked(lock);
      changed_.notify_all();
      return std::unexpected(good.error());
    }
    place.state = State::held;
    checked_[unit] = place.looked;
  }
  ++place.holders;
  ++stats_.acquired;
  const MemoryView view{place.data, units_[unit].bytes};
  if (is_slot(place)) give_up_those_behind(lock, unit);
  read_ahead(lock);
  return view;
}

Status StreamCore::release(std::size_t unit) {
  if (auto known = check_unit(unit); !known) return known;
  Lock lock(mutex_);
  Place* place = place_of(unit);
  if (place == nullptr || place->state != State::held)
    return std::unexpected(wrong(fmt::format("unit: {} is not acquired", units_[unit].name)));
  if (--place->holders > 0) return {};
  if (is_slot(*place)) {
    empty(*place);
  } else {
    place->state = State::ready;
  }
  changed_.notify_all();
  read_ahead(lock);
  return {};
}

Result<std::uint64_t> StreamCore::look(const StreamUnit& unit) {
  if (verify_ != StreamVerify::once) return 0;
  std::uint64_t latest = 0;
  std::size_t last = kNone;
  for (const StreamPart& part : unit.parts) {
    if (std::exchange(last, part.file) == part.file) continue;
    auto looked = stamps_.look(part.file);
    if (!looked) return looked;
    latest = std::max(latest, *looked);
  }
  return latest;
}

Status StreamCore::check(const Place& place) {
  const StreamUnit& unit = units_[place.unit];
  if (verify_ == StreamVerify::never) return {};
  if (verify_ == StreamVerify::once && !is_slot(place) && checked_[place.unit]) return {};
  const auto looked = look(unit);
  if (!looked) return std::unexpected(looked.error());
  if (verify_ == StreamVerify::once && checked_[place.unit] == *looked) return {};
  return check_sums(unit, place.data, *looked);
}

Status StreamCore::check_sums(const StreamUnit& unit, const std::byte* data, std::uint64_t looked) const {
  for (const StreamPart& part : unit.parts) {
    const std::string& path = files_[part.file].path();
    if (!part.checksum) {
      if (looked == 0) continue;
      return std::unexpected(make_error(
          ErrorKind::corrupt,
          fmt::format("reading {} from {}: the file was modified since it was opened, and there is no "
                      "checksum to tell whether these bytes were; open it again",
                      unit.name, path),
          path));
    }
    const std::uint32_t found = crc32c({data + part.at, part.bytes});
    if (found == *part.checksum) continue;
    return std::unexpected(make_error(
        ErrorKind::corrupt,
        fmt::format(
            "reading {}: bytes {} to {} of {} have the checksum {:08x} where {:08x} was recorded; they "
            "changed after they were written",
            unit.name, part.offset, part.offset + part.bytes, path, found, *part.checksum),
        path));
  }
  return {};
}

}  // namespace trunkline
