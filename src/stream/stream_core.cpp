#include "stream/stream_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/invalid_argument.h"
#include "base/log.h"
#include "base/trace.h"
#include "base/waits.h"
#include "io/engine_core.h"
#include "stream/pages.h"
#include "stream/stream_trace.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

StreamCore::StreamCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                       StreamPlacement placement, StreamVerify verify)
    : source_(engine, std::move(files), std::move(units), verify),
      units_(source_.units()),
      placement_(std::move(placement)),
      resident_frame_(units_.size(), kNone),
      schedule_(units_.size(), placement_.resident),
      checked_(units_.size()) {}

StreamCore::~StreamCore() {
  // In a forked child, what the parent's threads were doing never ends.
  if (source_.engine().core()->belongs_to_parent()) return;
  std::vector<Future> futures;
  Lock lock(mutex_);
  for (const Frame& frame : frames_) {
    if (frame.state == State::reading)
      futures.insert(futures.end(), frame.futures.begin(), frame.futures.end());
  }
  lock.unlock();
  for (Future& future : futures) future.cancel();
  lock.lock();
  changed_.wait(lock, [&] { return under_way_ == 0; });
}

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
  if (reading_ > 0) stats.read_ns += ns_since(reading_since_);
  return stats;
}

Status StreamCore::check_unit(std::size_t unit) const {
  if (unit < units_.size()) return {};
  return invalid_argument(fmt::format("unit: {} of {}", unit, units_.size()));
}

StreamCore::Frame* StreamCore::frame_of(std::size_t unit) {
  const std::size_t location = schedule_.location(unit);
  return location == kNone ? nullptr : &frames_[location];
}

// The frame that the unit can be read into now, or nullptr.
StreamCore::Frame* StreamCore::room_for(std::size_t unit) {
  if (resident_frame_[unit] != kNone) return &frames_[resident_frame_[unit]];
  const auto slots = std::span(frames_).first(placement_.slots);
  const auto slot = std::ranges::find(slots, State::empty, &Frame::state);
  return slot == slots.end() ? nullptr : &*slot;
}

// What the schedule needs to know about the slots.
std::span<const SlotUse> StreamCore::slot_uses() {
  using Use = SlotUse::State;
  uses_.clear();
  for (const Frame& frame : std::span(frames_).first(placement_.slots)) {
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
    Frame* frame = room_for(unit);
    if (frame == nullptr) return;
    schedule_.take_next();
    read(lock, *frame, unit);
  }
}

void StreamCore::read(Lock& lock, Frame& frame, std::size_t unit) {
  const std::vector<StreamPart>& parts = units_[unit].parts;
  const std::uint64_t reading = ++readings_;
  frame.unit = unit;
  frame.state = State::reading;
  frame.evicting = false;
  frame.pending = parts.size() + 1;  // one for the submission
  frame.reading = reading;
  frame.error.reset();
  frame.futures.clear();
  frame.trace_start_ns = trace::start();
  frame.trace_caller = trace::this_thread();
  schedule_.set_location(unit, frame_index(frame));
  ++under_way_;
  if (reading_++ == 0) reading_since_ = Clock::now();
  lock.unlock();

  const auto file_version = source_.version_of(unit);
  std::vector<Request> requests;
  source_.add_reads(unit, frame.data, requests);
  std::vector<Future> futures;
  if (file_version) futures = source_.engine().submit(requests);

  lock.lock();
  if (frame.reading == reading && frame.state == State::reading) frame.futures = futures;
  if (file_version) {
    frame.file_version = *file_version;
  } else {
    frame.error = file_version.error();
    frame.pending -= parts.size();
  }
  lock.unlock();
  for (Future& future : futures) {
    future.on_done([this, &frame, future] {
      const std::scoped_lock guard(mutex_);
      arrived(frame, future.result());
    });
  }
  lock.lock();
  arrived(frame, 0);
}

// Called for each part, and once for the submission.
void StreamCore::arrived(Frame& frame, const Result<std::uint64_t>& result) {
  if (!result && !frame.error) frame.error = result.error();
  if (--frame.pending > 0) return;
  frame.futures.clear();
  if (frame.trace_start_ns != 0) {
    trace::record({.kind = &kReadUnit,
                   .start_ns = frame.trace_start_ns,
                   .end_ns = trace::now(),
                   .caller = frame.trace_caller,
                   .text = trace::intern(units_[frame.unit].name),
                   .bytes = units_[frame.unit].bytes});
  }
  if (frame.error && !frame.evicting) ++stats_.failed;
  if (frame.evicting) {
    empty(frame);
  } else if (frame.error) {
    frame.state = State::failed;
  } else {
    frame.state = State::ready;
    ++stats_.units_read;
    for (const StreamPart& part : units_[frame.unit].parts) stats_.bytes_read += part.bytes;
  }
  if (--reading_ == 0) stats_.read_ns += ns_since(reading_since_);
  --under_way_;
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

void StreamCore::empty(Frame& frame) {
  schedule_.set_location(frame.unit, kNone);
  frame.unit = kNone;
  frame.state = State::empty;
  frame.evicting = false;
  frame.error.reset();
}

// False once the deadline has passed.
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
  std::optional<trace::Span> span;
  const auto stop_waiting = [&] {
    span.reset();
    if (!waiting) return;
    const std::uint64_t waited_ns = ns_since(*std::exchange(waiting, std::nullopt));
    stats_.wait_ns += waited_ns;
    if (waited_ns < kLongWaitNs) return;
    log::info(log::Component::stream, "waited {:.1f} s for {} to be read",
              static_cast<double>(waited_ns) / 1e9, units_[unit].name);
  };
  while (true) {
    Frame* frame = frame_of(unit);
    if (frame == nullptr) {
      if (auto moved = reprioritize(lock, unit); !moved) return std::unexpected(moved.error());
      frame = frame_of(unit);
    }
    if (frame != nullptr &&
        (frame->state == State::ready || frame->state == State::held || frame->state == State::failed)) {
      stop_waiting();
      return take(lock, *frame);
    }
    if (!waiting) {
      waiting = Clock::now();
      span.emplace(kUnitWait, units_[unit].name);
      ++stats_.waited;
    }
    if (frame != nullptr) ++frame->waiters;
    const bool in_time = wait(lock, deadline);
    if (frame != nullptr) --frame->waiters;
    if (!in_time) {
      stop_waiting();
      return std::unexpected(
          make_error(ErrorKind::timed_out, fmt::format("{} has not arrived yet", units_[unit].name)));
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
  if (std::ranges::all_of(slots, [](const Frame& frame) {
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
  std::vector<Frame*> behind;
  for (const std::size_t slot : schedule_.slots_behind(unit, slot_uses())) behind.push_back(&frames_[slot]);
  evict(lock, behind);
}

// Evicts the unit that is used last, unless a slot is empty or will be.
void StreamCore::make_room(Lock& lock, std::size_t unit) {
  if (const auto slot = schedule_.slot_to_evict(unit, slot_uses())) evict(lock, {&frames_[*slot]});
}

bool StreamCore::may_evict(const Frame& frame) {
  if (frame.waiters > 0 || frame.evicting) return false;
  return frame.state == State::reading || frame.state == State::ready || frame.state == State::failed;
}

void StreamCore::evict(Lock& lock, const std::vector<Frame*>& frames) {
  std::vector<Future> futures;
  for (Frame* frame : frames) {
    ++stats_.unused;
    if (frame->state == State::reading) {
      frame->evicting = true;
      futures.insert(futures.end(), frame->futures.begin(), frame->futures.end());
    } else {
      empty(*frame);
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

// After an error: what was read ahead came from the same storage, perhaps before the cause was removed.
void StreamCore::evict_unchecked(Lock& lock) {
  std::vector<Frame*> suspect;
  for (Frame& frame : frames_) {
    if (may_evict(frame) && (is_slot(frame) || !checked_[frame.unit])) suspect.push_back(&frame);
  }
  evict(lock, suspect);
}

// Hands out a unit that has arrived, once its checksums are verified, and continues reading ahead.
Result<MemoryView> StreamCore::take(Lock& lock, Frame& frame) {
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
    lock.unlock();
    const auto started = Clock::now();
    const Status good = check(frame);
    const std::uint64_t spent = ns_since(started);
    lock.lock();
    stats_.verify_ns += spent;
    changed_.notify_all();
    if (!good) {
      ++stats_.failed;
      empty(frame);
      evict_unchecked(lock);
      changed_.notify_all();
      return std::unexpected(good.error());
    }
    frame.state = State::held;
    checked_[unit] = frame.file_version;
  }
  ++frame.holders;
  ++stats_.acquired;
  const MemoryView view{frame.data, units_[unit].bytes};
  if (is_slot(frame)) evict_behind(lock, unit);
  read_ahead(lock);
  return view;
}

Status StreamCore::release(std::size_t unit) {
  if (auto known = check_unit(unit); !known) return known;
  Lock lock(mutex_);
  Frame* frame = frame_of(unit);
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

Status StreamCore::check(const Frame& frame) {
  const StreamUnit& unit = units_[frame.unit];
  if (source_.verify() == StreamVerify::never) return {};
  if (source_.verify() == StreamVerify::once && !is_slot(frame) && checked_[frame.unit]) return {};
  const auto file_version = source_.version_of(frame.unit);
  if (!file_version) return std::unexpected(file_version.error());
  if (source_.verify() == StreamVerify::once && checked_[frame.unit] == *file_version) return {};
  const trace::Span span(kCheckUnit, unit.name, unit.bytes);
  return source_.check_sums(frame.unit, frame.data, *file_version);
}

}  // namespace trunkline
