// Which unit is read next into a cache of units, and which one is evicted for it. Pure: it reads nothing, and
// knows only what the caller reports about the slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stream/use_rates.h"
#include "trunkline/unit_cache.h"

namespace trunkline {

// A request names the units that a step of a group uses, in their order. Those that have no slot are read in
// that order, each into an empty slot, or the one whose unit is worth least. Units of the request are
// not evicted before they have been used. Not synchronised.
class CacheSchedule {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  struct Place {
    std::size_t group = 0;
    std::size_t pool = 0;
  };
  struct Read {
    std::size_t unit = 0;
    std::size_t slot = 0;
    std::size_t evicted = kNone;  // the unit that had the slot
  };

  // `slots`: how many each pool has; slots are numbered through all pools. `read_ahead`: how many units of
  // each pool may be read for a request before the first of them has been used.
  CacheSchedule(std::span<const Place> units, std::span<const std::size_t> slots, std::size_t read_ahead);

  // Of each unit, how much it is used in the long run: kept for another schedule of the same units.
  std::vector<double> use_rates() const { return rates_.long_run(); }
  void restore_use_rates(std::span<const double> use_rates) { rates_.restore(use_rates); }

  // Replaces the request before. `expected`: units that may be read afterwards, for the next request.
  void request(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens,
               std::span<const std::size_t> expected = {});
  // The unit has been used: it may be evicted.
  void finish(std::size_t unit);

  // The next read of the request, if there is room for it. The slot has the unit from now on.
  std::optional<Read> next();
  // A read that cannot wait. Of the units that the request still needs, the last one may be evicted. nullopt
  // while all slots are in use.
  std::optional<Read> read_now(std::size_t unit);

  std::size_t slot_of(std::size_t unit) const { return slot_of_[unit]; }
  void vacate(std::size_t slot);
  // Whether the slot is in use, apart from the needs of the request: it is not evicted.
  void set_in_use(std::size_t slot, bool in_use) { slots_[slot].in_use = in_use; }
  // Whether the request needs the unit, which has not been used yet.
  bool is_wanted(std::size_t unit) const { return position_[unit] != kNone; }

 private:
  struct Slot {
    std::size_t unit = kNone;
    bool in_use = false;
  };
  struct Pool {
    std::size_t first_slot = 0;
    std::size_t slots = 0;
    std::vector<std::size_t> wanted;  // units of the request
    std::size_t next = 0;             // of those to be read
    std::size_t ahead = 0;            // of those that were read for it: not used yet
  };

  std::optional<Read> next_of(Pool& pool);
  std::size_t slot_for(const Pool& pool, bool may_evict_wanted) const;
  double value(std::size_t unit) const;
  Read assign(std::size_t unit, std::size_t slot);

  const std::vector<Place> units_;
  const std::size_t read_ahead_;
  UseRates rates_;
  std::vector<Slot> slots_;
  std::vector<Pool> pools_;
  std::vector<std::size_t> slot_of_;         // by unit
  std::vector<std::size_t> position_;        // by unit: in the request; kNone unless it is wanted
  std::vector<bool> was_read_;               // by unit: for the request, and has not been used
  std::vector<std::size_t> requested_;       // units with one of these
  std::vector<std::uint64_t> last_request_;  // of each group
  std::uint64_t requests_ = 0;
};

}  // namespace trunkline
