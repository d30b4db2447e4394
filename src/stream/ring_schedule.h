// Which unit is fetched next, and which units are evicted for it: the decisions of a ring of slots that
// serves units in a cyclic order. Pure: it fetches nothing, and knows only what the caller reports about the
// slots.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace trunkline {

// The state of a slot, as far as it matters for eviction.
struct SlotUse {
  enum class State {
    empty,
    evicting,   // becomes empty soon by itself
    evictable,  // holds or fetches a unit that nobody uses or waits for
    in_use,
  };
  State state = State::empty;
  std::size_t unit = 0;  // unless it is empty
};

// Not synchronised.
class RingSchedule {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // `resident`: units with their own memory, which never use a slot; may be empty if there are none.
  explicit RingSchedule(std::size_t units, std::vector<bool> resident = {});

  // Sets the cyclic order in which units are used; each appears once. The unit to be fetched next stays the
  // same.
  void set_order(std::vector<std::size_t> order);

  // The next unit of the order that has no location; kNone if all have one.
  std::size_t next();
  // Returns next(), and continues fetching after it.
  std::size_t take_next();
  // Makes `unit` the next one to be fetched. Returns whether that is a change.
  bool move_to(std::size_t unit);

  // Where a unit is, or is being fetched to: a number whose meaning is up to the caller; kNone: nowhere.
  std::size_t location(std::size_t unit) const { return location_[unit]; }
  void set_location(std::size_t unit, std::size_t location) { location_[unit] = location; }

  // How many units between `from` and `to` in the cycle use slots.
  std::size_t distance(std::size_t from, std::size_t to) const;

  // The slots that are more useful to the units following `unit`: evictable ones whose unit is used only
  // after as many others as there are slots.
  std::vector<std::size_t> slots_behind(std::size_t unit, std::span<const SlotUse> slots) const;

  // The slot to evict to make room for `unit`: the evictable one whose unit is used last. nullopt where a
  // slot is empty, or will be, or nothing may be evicted.
  std::optional<std::size_t> slot_to_evict(std::size_t unit, std::span<const SlotUse> slots) const;

 private:
  std::vector<bool> resident_;
  std::vector<std::size_t> location_;  // of each unit
  std::vector<std::size_t> order_;     // of units
  std::vector<std::size_t> position_;  // of each unit in the order
  std::vector<std::size_t> rank_;      // of each unit among those that use slots, in the order
  std::size_t taking_slots_ = 0;       // number of units that use slots
  std::size_t next_ = 0;               // position of the unit that is fetched next
};

}  // namespace trunkline
