#include "stream/ring_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace trunkline {

RingSchedule::RingSchedule(std::size_t units, std::vector<bool> resident)
    : resident_(std::move(resident)), location_(units, kNone), position_(units), rank_(units) {
  resident_.resize(units);
  std::vector<std::size_t> order(units);
  std::iota(order.begin(), order.end(), 0);
  set_order(std::move(order));
}

void RingSchedule::set_order(std::vector<std::size_t> order) {
  const std::size_t next = order_.empty() ? kNone : order_[next_];
  order_ = std::move(order);
  taking_slots_ = 0;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const std::size_t unit = order_[i];
    position_[unit] = i;
    rank_[unit] = taking_slots_;
    if (!resident_[unit]) ++taking_slots_;
  }
  next_ = next == kNone ? 0 : position_[next];
}

std::size_t RingSchedule::next() {
  for (std::size_t passed = 0; passed < order_.size(); ++passed) {
    if (location_[order_[next_]] == kNone) return order_[next_];
    next_ = (next_ + 1) % order_.size();
  }
  return kNone;
}

std::size_t RingSchedule::take_next() {
  const std::size_t unit = next();
  if (unit != kNone) next_ = (next_ + 1) % order_.size();
  return unit;
}

bool RingSchedule::move_to(std::size_t unit) {
  return std::exchange(next_, position_[unit]) != position_[unit];
}

std::size_t RingSchedule::distance(std::size_t from, std::size_t to) const {
  return (rank_[to] + taking_slots_ - rank_[from]) % taking_slots_;
}

std::vector<std::size_t> RingSchedule::slots_behind(std::size_t unit, std::span<const SlotUse> slots) const {
  std::vector<std::size_t> behind;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].state == SlotUse::State::evictable && distance(unit, slots[slot].unit) >= slots.size())
      behind.push_back(slot);
  }
  return behind;
}

std::optional<std::size_t> RingSchedule::slot_to_evict(std::size_t unit,
                                                       std::span<const SlotUse> slots) const {
  std::optional<std::size_t> last;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const auto& [state, held] = slots[slot];
    if (state == SlotUse::State::empty || state == SlotUse::State::evicting) return std::nullopt;
    if (state != SlotUse::State::evictable) continue;
    if (!last || distance(unit, held) > distance(unit, slots[*last].unit)) last = slot;
  }
  return last;
}

}  // namespace trunkline
