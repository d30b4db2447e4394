// Which unit is fetched next, and which units give way to it: the decisions of a ring of slots that serves
// units in a cyclic order. Pure: it fetches nothing, and knows slots by what the caller reports.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace trunkline {

// What a slot does, as far as others may take its place.
struct SlotUse {
  enum class State {
    empty,
    evicting,   // empty soon, without being asked again
    evictable,  // holds a unit, or fetches one, that nobody uses or waits for
    in_use,
  };
  State state = State::empty;
  std::size_t unit = 0;  // unless it is empty
};

// Not synchronised.
class RingSchedule {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // `resident`: units with memory of their own, which never take a slot; empty where there are none.
  explicit RingSchedule(std::size_t units, std::vector<bool> resident = {});

  // The order in which units are used, again and again; each once. What is fetched next stays the same unit.
  void set_order(std::vector<std::size_t> order);

  // The next unit of the order that has no location; kNone where all have one.
  std::size_t next();
  // The same, and fetching goes on behind it.
  std::size_t take_next();
  // `unit` is to be fetched next. Whether that is a change.
  bool move_to(std::size_t unit);

  // Where a unit is, or is fetched to: a number that means something to the caller; kNone: nowhere.
  std::size_t location(std::size_t unit) const { return location_[unit]; }
  void set_location(std::size_t unit, std::size_t location) { location_[unit] = location; }

  // How many units take slots between `from` and `to`, in the cycle.
  std::size_t distance(std::size_t from, std::size_t to) const;

  // The slots that are of more use to what follows `unit`: evictable, with a unit that is used only after as
  // many others as there are slots.
  std::vector<std::size_t> slots_behind(std::size_t unit, std::span<const SlotUse> slots) const;

  // The slot to evict so that `unit` has one: the evictable one whose unit is used last. None where a slot is
  // empty, or will be, or nothing may be evicted.
  std::optional<std::size_t> slot_to_evict(std::size_t unit, std::span<const SlotUse> slots) const;

 private:
  std::vector<bool> resident_;
  std::vector<std::size_t> location_;  // of each unit
  std::vector<std::size_t> order_;     // of units
  std::vector<std::size_t> position_;  // of each unit in the order
  std::vector<std::size_t> rank_;      // of each unit among those that take slots, in the order
  std::size_t taking_slots_ = 0;       // units
  std::size_t next_ = 0;               // position of what is fetched next
};

}  // namespace trunkline
