#include "stream/upload_ring.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/trace.h"
#include "base/waits.h"
#include "os/signals_blocked.h"
#include "stream/pages.h"
#include "stream/stream_trace.h"
#include "stream/unit_source.h"

namespace trunkline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kDeviceAlignment = 512;  // as for allocators of CUDA memory
constexpr std::chrono::milliseconds kAcquireTimeout{50};

std::uint64_t device_bytes(const StreamUnit& unit) {
  const std::vector<std::uint64_t> layout = device_layout(unit);
  return layout.empty() ? 0 : layout.back() + unit.parts.back().bytes;
}

// How many units of the host's stream may be held at once; the next read needs one of its slots.
std::size_t max_held(const StreamPlacement& placement, std::size_t units) {
  return placement.slots == 0 ? units : placement.slots;
}

}  // namespace

std::vector<std::uint64_t> device_layout(const StreamUnit& unit) {
  std::vector<std::uint64_t> layout;
  std::uint64_t at = 0;
  for (const StreamPart& part : unit.parts) {
    at = (at + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
    layout.push_back(at);
    at += part.bytes;
  }
  return layout;
}

std::uint64_t device_slot_bytes(std::span<const StreamUnit> units) {
  std::uint64_t most = 1;
  for (const StreamUnit& unit : units) most = std::max(most, device_bytes(unit));
  return whole_pages(most);
}

UploadRing::UploadRing(StreamCore& host, const MemoryView& memory)
    : host_(host),
      memory_(memory),
      units_(host.units()),
      max_held_(max_held(host.placement(), units_.size())),
      slots_(memory.bytes / device_slot_bytes(units_)),
      schedule_(units_.size()) {
  const std::uint64_t slot_bytes = device_slot_bytes(units_);
  for (std::size_t index = 0; index < slots_.size(); ++index)
    slots_[index].data = memory.data + index * slot_bytes;
}

UploadRing::~UploadRing() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

Status UploadRing::start() {
  Device& device = *memory_.device;
  // Work on the caller's stream may still use the memory.
  auto fence = device.fence(memory_.stream);
  if (!fence) return std::unexpected(fence.error());
  for (Slot& slot : slots_) slot.after = *fence;
  for (const MemoryView& memory : host_.memory()) {
    if (memory.bytes == 0) continue;
    // Copies from memory that cannot be pinned are only slower.
    if (auto pin = device.pin({memory.data, memory.bytes})) pins_.push_back(std::move(*pin));
  }
  auto copies = device.open_queue([this] { copies_ended(); });
  if (!copies) return std::unexpected(copies.error());
  copies_ = std::move(*copies);
  const os::SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error& refused) {
    return std::unexpected(system_error(refused.code().value(), "start a thread for streaming"));
  }
  return {};
}

StreamStats UploadRing::stats() const {
  StreamStats stats = host_.stats();
  const std::scoped_lock lock(mutex_);
  stats.acquired = stats_.acquired;
  stats.waited = stats_.waited;
  stats.wait_ns = stats_.wait_ns;
  stats.bytes_copied = stats_.bytes_copied;
  return stats;
}

void UploadRing::work() {
  pthread_setname_np(pthread_self(), "trunkline-h2d");
  Lock lock(mutex_);
  while (!stopping_) {
    Slot* slot = held_ < max_held_ ? next_slot() : nullptr;
    if (slot == nullptr) {
      changed_.wait(lock);
    } else {
      upload(lock, *slot);
    }
  }
}

// An empty slot for the unit that is copied next; nullptr where there is no such slot or unit.
UploadRing::Slot* UploadRing::next_slot() {
  if (schedule_.next() == kNone) return nullptr;
  const auto slot = std::ranges::find(slots_, State::empty, &Slot::state);
  return slot == slots_.end() ? nullptr : &*slot;
}

void UploadRing::upload(Lock& lock, Slot& slot) {
  const std::size_t unit = schedule_.take_next();
  const auto index = static_cast<std::size_t>(&slot - slots_.data());
  schedule_.set_location(unit, index);
  slot.unit = unit;
  slot.state = State::copying;
  slot.copies = 1;  // until all have been started
  ++held_;
  lock.unlock();

  const auto source = acquire_from_host(unit);
  if (!source) {
    lock.lock();
    --held_;
    slot.copies = 0;
    slot.error = source.error();
    settle(slot);
    return;
  }
  const std::vector<StreamPart>& parts = units_[unit].parts;
  const std::vector<std::uint64_t> layout = device_layout(units_[unit]);
  lock.lock();
  if (stopping_) slot.evicting = true;
  slot.trace_start_ns = trace::start();
  const bool wanted = !slot.evicting;
  for (std::size_t part = 0; wanted && part < parts.size(); ++part) {
    if (parts[part].bytes > 0) ++slot.copies;
  }
  const Fence after = slot.after;
  lock.unlock();
  for (std::size_t part = 0; wanted && part < parts.size(); ++part) {
    if (parts[part].bytes == 0) continue;
    copies_->start({.direction = Direction::from_host,
                    .host = source->data + parts[part].at,
                    .device = slot.data + layout[part],
                    .bytes = parts[part].bytes,
                    .after = after,
                    .tag = static_cast<std::uint32_t>(index)});
  }
  copies_->send();
  lock.lock();
  if (--slot.copies > 0) return;
  lock.unlock();
  std::ignore = host_.release(unit);
  lock.lock();
  --held_;
  settle(slot);
}

Result<MemoryView> UploadRing::acquire_from_host(std::size_t unit) {
  while (true) {
    auto source = host_.acquire(unit, kAcquireTimeout);
    if (source || source.error().kind != ErrorKind::timed_out) return source;
    const std::scoped_lock lock(mutex_);
    if (stopping_) return source;
  }
}

void UploadRing::copies_ended() {
  std::vector<CopyQueue::Completion> completions;
  copies_->take(completions);
  for (const CopyQueue::Completion& copy : completions) {
    Slot& slot = slots_[copy.tag];
    {
      const std::scoped_lock lock(mutex_);
      if (copy.error && !slot.error) slot.error = copy.error;
      if (--slot.copies > 0) continue;
    }
    std::ignore = host_.release(slot.unit);  // starts the next read
    const std::scoped_lock lock(mutex_);
    --held_;
    settle(slot);
  }
}

// Called when nothing uses the slot any more.
void UploadRing::settle(Slot& slot) {
  if (const std::uint64_t began = std::exchange(slot.trace_start_ns, 0); began != 0) {
    trace::record({.kind = &kUploadUnit,
                   .start_ns = began,
                   .end_ns = trace::now(),
                   .text = trace::intern(units_[slot.unit].name),
                   .device = trace::intern(memory_.device->name()),
                   .bytes = units_[slot.unit].bytes});
  }
  if (slot.evicting) {
    empty(slot);
  } else if (slot.error) {
    slot.state = State::failed;
  } else {
    slot.state = State::ready;
    slot.after.reset();  // not earlier: after a failed copy the next one must wait for it as well
    stats_.bytes_copied += stored_bytes(units_[slot.unit]);
  }
  changed_.notify_all();
}

void UploadRing::empty(Slot& slot) {
  schedule_.set_location(slot.unit, kNone);
  slot.unit = kNone;
  slot.state = State::empty;
  slot.evicting = false;
  slot.error.reset();
}

Result<MemoryView> UploadRing::acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout) {
  const auto began = Clock::now();
  if (unit >= units_.size()) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, fmt::format("unit: {} of {}", unit, units_.size())));
  }
  bool waited = false;
  std::optional<trace::Span> span;
  Lock lock(mutex_);
  while (true) {
    if (schedule_.location(unit) == kNone) {
      if (auto moved = reprioritize(unit); !moved) return std::unexpected(moved.error());
    } else {
      Slot& slot = slots_[schedule_.location(unit)];
      if (slot.state == State::held) {
        return std::unexpected(make_error(ErrorKind::invalid_argument,
                                          fmt::format("unit: {} is already acquired", units_[unit].name)));
      }
      if (waited && slot.state != State::copying) stats_.wait_ns += ns_since(began);
      if (slot.state == State::failed) {
        Error error = std::move(*slot.error);
        // What failed after it came from the same storage, perhaps before the cause was removed.
        for (Slot& each : slots_) {
          if (each.state == State::failed) empty(each);
        }
        schedule_.move_to(unit);
        changed_.notify_all();
        return std::unexpected(std::move(error));
      }
      if (slot.state == State::ready) {
        slot.state = State::held;
        ++stats_.acquired;
        return MemoryView{slot.data, device_bytes(units_[unit]), memory_.device};
      }
    }
    if (!std::exchange(waited, true)) {
      span.emplace(kUnitWait, units_[unit].name);
      ++stats_.waited;
    }
    if (!timeout) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, began + *timeout) == std::cv_status::timeout) {
      stats_.wait_ns += ns_since(began);
      return std::unexpected(
          make_error(ErrorKind::timed_out, fmt::format("{} has not arrived yet", units_[unit].name)));
    }
  }
}

// Copies `unit` next, although another one was expected. Keeps what is used soon after it, if there is room.
Status UploadRing::reprioritize(std::size_t unit) {
  if (std::ranges::all_of(slots_, [](const Slot& slot) { return slot.state == State::held; })) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   fmt::format("unit: {} needs a slot, but each of the {} holds an acquired unit; release "
                               "one first, or open the stream with more slots",
                               units_[unit].name, slots_.size())));
  }
  bool has_changed = schedule_.move_to(unit);
  for (const std::size_t slot : schedule_.slots_behind(unit, slot_uses())) {
    evict(slots_[slot]);
    has_changed = true;
  }
  if (const auto slot = schedule_.slot_to_evict(unit, slot_uses())) {
    evict(slots_[*slot]);
    has_changed = true;
  }
  if (has_changed) changed_.notify_all();  // otherwise threads waiting here would wake each other endlessly
  return {};
}

void UploadRing::evict(Slot& slot) {
  if (slot.state == State::copying) {
    slot.evicting = true;
  } else {
    empty(slot);
  }
}

// What the schedule needs to know about the slots.
std::vector<SlotUse> UploadRing::slot_uses() const {
  using Use = SlotUse::State;
  std::vector<SlotUse> uses;
  for (const Slot& slot : slots_) {
    const Use use = slot.state == State::empty  ? Use::empty
                    : slot.evicting             ? Use::evicting
                    : slot.state == State::held ? Use::in_use
                                                : Use::evictable;
    uses.push_back({use, slot.unit});
  }
  return uses;
}

Status UploadRing::release(std::size_t unit, void* stream) {
  auto fence = memory_.device->fence(stream);
  if (!fence) return std::unexpected(fence.error());
  const std::scoped_lock lock(mutex_);
  const std::size_t location = unit < units_.size() ? schedule_.location(unit) : kNone;
  if (location == kNone || slots_[location].state != State::held) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, fmt::format("unit: {} is not acquired", unit)));
  }
  Slot& slot = slots_[location];
  slot.after = std::move(*fence);
  empty(slot);
  changed_.notify_all();
  return {};
}

void UploadRing::set_order(std::vector<std::size_t> order) {
  const std::scoped_lock lock(mutex_);
  schedule_.set_order(std::move(order));
  changed_.notify_all();
}

}  // namespace trunkline
