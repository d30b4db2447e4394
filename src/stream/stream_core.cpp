#include "stream/stream_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/invalid_argument.h"
#include "stream/pages.h"
#include "stream/unit_wait.h"

namespace trunkline {

StreamCore::StreamCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                       StreamPlacement placement, StreamVerify verify)
    : source_(engine, std::move(files), std::move(units), verify),
      units_(source_.units()),
      placement_(std::move(placement)),
      resident_frame_(units_.size(), kNone),
      schedule_(units_.size(), placement_.resident),
      loader_(source_, mutex_, changed_, [this](UnitFrame& frame) {
        if (frame.evicting) empty(frame);
      }) {}

Status StreamCore::start() {
  // Of all files, so that a modification of a file that is read later is noticed from now on.
  if (auto begun = source_.begin(); !begun) return begun;
  std::uint64_t resident_bytes = 0;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (placement_.resident[unit]) resident_bytes += whole_pages(units_[unit].bytes);
  }
  auto slots = source_.engine().allocate(placement_.slots * placement_.slot_bytes);
  if (!slots) return std::unexpected(slots.error());
  slots_ = std::move(*slots);
  auto resident = Buffer::allocate_pageable(resident_bytes);
  if (!resident) return std::unexpected(resident.error());
  resident_ = std::move(*resident);
  memory_ = {slots_.span(), resident_.span()};

  frames_.resize(placement_.slots);
  for (std::size_t slot = 0; slot < placement_.slots; ++slot)
    frames_[slot].data = slots_.data() + slot * placement_.slot_bytes;
  std::uint64_t at = 0;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (!placement_.resident[unit]) continue;
    resident_frame_[unit] = frames_.size();
    frames_.emplace_back().data = resident_.data() + at;
    at += whole_pages(units_[unit].bytes);
  }
  std::vector<std::size_t> order(units_.size());
  std::iota(order.begin(), order.end(), 0);
  return set_order(std::move(order));
}

Status StreamCore::set_order(std::vector<std::size_t> order) {
  std::vector<bool> is_ordered(units_.size());
  for (const std::size_t unit : order) {
    if (unit < is_ordered.size()) is_ordered[unit] = true;
  }
  if (order.size() != units_.size() || std::ranges::find(is_ordered, false) != is_ordered.end())
    return invalid_argument(fmt::format("order: must name each of the {} units exactly once", units_.size()));
  Lock lock(mutex_);
  schedule_.set_order(std::move(order));
  read_ahead(lock);
  return {};
}

StreamStats StreamCore::stats() const {
  const std::scoped_lock lock(mutex_);
  StreamStats stats = stats_;
  loader_.stats().copy_to(stats);
  return stats;
}

UnitFrame* StreamCore::frame_of(std::size_t unit) {
  const std::size_t location = schedule_.location(unit);
  return location == kNone ? nullptr : &frames_[location];
}

// The frame that the unit can be read into now, or nullptr.
UnitFrame* StreamCore::room_for(std::size_t unit) {
  if (resident_frame_[unit] != kNone) return &frames_[resident_frame_[unit]];
  const auto slots = std::span(frames_).first(placement_.slots);
  const auto slot = std::ranges::find(slots, State::empty, &UnitFrame::state);
  return slot == slots.end() ? nullptr : &*slot;
}

// What the schedule needs to know about the slots.
std::span<const SlotUse> StreamCore::slot_uses() {
  using Use = SlotUse::State;
  uses_.clear();
  for (const UnitFrame& frame : std::span(frames_).first(placement_.slots)) {
    const Use use = frame.state == State::empty ? Use::empty
                    : frame.evicting            ? Use::evicting
                    : may_evict(frame)          ? Use::evictable
                                                : Use::in_use;
    uses_.push_back({use, frame.unit});
  }
  return uses_;
}

// Starts reading the next units, as long as there is room.
void StreamCore::read_ahead(Lock& lock) {
  while (true) {
    const std::size_t unit = schedule_.next();
    if (unit == kNone) return;
    UnitFrame* frame = room_for(unit);
    if (frame == nullptr) return;
    schedule_.take_next();
    read(lock, *frame, unit);
  }
}

void StreamCore::read(Lock& lock, UnitFrame& frame, std::size_t unit) {
  schedule_.set_location(unit, frame_index(frame));
  loader_.assign(frame, unit);
  UnitFrame* const frames[] = {&frame};
  loader_.read(lock, frames);
}

void StreamCore::empty(UnitFrame& frame) {
  schedule_.set_location(frame.unit, kNone);
  frame.clear();
}

Result<MemoryView> StreamCore::acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout) {
  if (auto known = source_.check_unit(unit); !known) return std::unexpected(known.error());
  UnitWait waiting(changed_, loader_.counts(), units_[unit].name, timeout);
  Lock lock(mutex_);
  while (true) {
    UnitFrame* frame = frame_of(unit);
    if (frame == nullptr) {
      if (auto moved = reprioritize(lock, unit); !moved) return std::unexpected(moved.error());
      frame = frame_of(unit);
    }
    if (frame != nullptr && frame->has_arrived()) {
      waiting.end();
      return take(lock, *frame);
    }
    if (frame != nullptr) ++frame->waiters;
    const bool in_time = waiting.wait(lock);
    if (frame != nullptr) --frame->waiters;
    if (!in_time) {
      waiting.end();
      return std::unexpected(waiting.timed_out());
    }
  }
}

// Reads `unit` next, although another one was expected. Keeps what others wait for, and what is used soon
// after `unit`, if there is room.
Status StreamCore::reprioritize(Lock& lock, std::size_t unit) {
  if (resident_frame_[unit] != kNone) {
    read(lock, frames_[resident_frame_[unit]], unit);
    return {};
  }
  const auto slots = std::span(frames_).first(placement_.slots);
  if (std::ranges::all_of(slots, [](const UnitFrame& frame) {
        return frame.state == State::held || frame.state == State::checking;
      })) {
    return invalid_argument(fmt::format(
        "unit: {} needs a slot, but each of the {} holds an acquired unit; release one first, or open the "
        "stream with more slots",
        units_[unit].name, placement_.slots));
  }
  schedule_.move_to(unit);
  evict_behind(lock, unit);
  make_room(lock, unit);
  read_ahead(lock);
  return {};
}

// Evicts units that are not used soon after `unit`, so that their slots serve those that are.
void StreamCore::evict_behind(Lock& lock, std::size_t unit) {
  std::vector<UnitFrame*> behind;
  for (const std::size_t slot : schedule_.slots_behind(unit, slot_uses())) behind.push_back(&frames_[slot]);
  evict(lock, behind);
}

// Evicts the unit that is used last, unless a slot is empty or will be.
void StreamCore::make_room(Lock& lock, std::size_t unit) {
  if (const auto slot = schedule_.slot_to_evict(unit, slot_uses())) evict(lock, {&frames_[*slot]});
}

bool StreamCore::may_evict(const UnitFrame& frame) {
  if (frame.waiters > 0 || frame.evicting) return false;
  return frame.state == State::reading || frame.state == State::ready || frame.state == State::failed;
}

void StreamCore::evict(Lock& lock, const std::vector<UnitFrame*>& frames) {
  for (UnitFrame* frame : frames) {
    ++stats_.unused;
    if (frame->state == State::reading) {
      frame->evicting = true;
    } else {
      empty(*frame);
    }
  }
  loader_.cancel(lock, frames);
}

// After an error: what was read ahead came from the same storage, perhaps before the cause was removed.
void StreamCore::evict_unchecked(Lock& lock) {
  std::vector<UnitFrame*> suspect;
  for (UnitFrame& frame : frames_) {
    if (may_evict(frame) && (is_slot(frame) || !loader_.was_verified(frame.unit))) suspect.push_back(&frame);
  }
  evict(lock, suspect);
}

// Hands out a unit that has arrived, once its checksums are verified, and continues reading ahead.
Result<MemoryView> StreamCore::take(Lock& lock, UnitFrame& frame) {
  const std::size_t unit = frame.unit;
  if (frame.error) {
    Error error = std::move(*frame.error);
    empty(frame);
    evict_unchecked(lock);
    changed_.notify_all();
    return std::unexpected(std::move(error));
  }
  if (frame.state == State::ready) {
    frame.state = State::checking;
    if (Status good = loader_.verify(lock, frame); !good) {
      empty(frame);
      evict_unchecked(lock);
      changed_.notify_all();
      return std::unexpected(good.error());
    }
    frame.state = State::held;
  }
  ++frame.holders;
  ++loader_.counts().acquired;
  const MemoryView view{frame.data, units_[unit].bytes};
  if (is_slot(frame)) evict_behind(lock, unit);
  read_ahead(lock);
  return view;
}

Status StreamCore::release(std::size_t unit) {
  if (auto known = source_.check_unit(unit); !known) return known;
  Lock lock(mutex_);
  UnitFrame* frame = frame_of(unit);
  if (frame == nullptr || frame->state != State::held)
    return invalid_argument(fmt::format("unit: {} is not acquired", units_[unit].name));
  if (--frame->holders > 0) return {};
  if (is_slot(*frame)) {
    empty(*frame);
  } else {
    frame->state = State::ready;
  }
  changed_.notify_all();
  read_ahead(lock);
  return {};
}

}  // namespace trunkline
