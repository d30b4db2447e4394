// What a cache of routed experts would have done for a recorded routing: by the schedule that UnitCache
// follows, and by other policies to compare it with. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stream/cache_schedule.h"
#include "trunkline/error.h"
#include "trunkline/unit_cache.h"

namespace trunkline {

// A module with experts. Its units are the matrices of all experts, matrix after matrix.
struct ReplayModule {
  std::size_t experts = 0;
  std::vector<std::size_t> pools;  // of each matrix of an expert
};

// A step of a module: the experts that its tokens used.
struct ReplayStep {
  std::size_t module = 0;
  std::uint64_t tokens = 1;
  std::vector<UnitUse> uses;  // `unit` is the number of an expert
  bool expects_next = false;  // all units of the next module are expected: UnitCache::request
};

struct ReplayCounts {
  std::uint64_t steps = 0;
  std::uint64_t hits = 0;  // units that were in memory when the step began
  std::uint64_t misses = 0;
  std::uint64_t evictions = 0;
  std::vector<std::uint64_t> units_read;  // by pool; a unit may be read twice for a step, or ahead of one
};

// Never changes after it was made, so that any number of threads may use it.
class CacheReplay {
 public:
  // Fails with invalid_argument for a step of a module or an expert that does not exist.
  static Result<CacheReplay> create(std::vector<ReplayModule> modules, std::vector<ReplayStep> steps);

  struct Replayed {
    ReplayCounts all;
    ReplayCounts counted;
  };
  // All steps, with a cache that is empty at first and has so many slots in each pool. `counted`: those steps
  // that have `tokens` tokens.
  Replayed replay(std::span<const std::size_t> slots, std::size_t read_ahead, std::uint64_t tokens) const;

  // Hits of other policies with the same slots. They evict no unit of the present step, if they can.
  std::uint64_t lru_hits(std::span<const std::size_t> slots) const;
  // Of units that were used equally often, the one that was not used for longest is evicted.
  std::uint64_t lfu_hits(std::span<const std::size_t> slots) const;
  // A fixed choice, which is in memory from the start: the units that the first half of the steps uses most.
  // `for_misses`: slots of each pool that misses pass through, so that so many can be read at a time.
  std::uint64_t static_hits(std::span<const std::size_t> slots, std::size_t for_misses) const;

  std::uint64_t uses() const { return uses_; }
  // Units that are used at all: their first uses are misses for every cache that is empty at first.
  std::uint64_t used_units() const { return used_units_; }

 private:
  CacheReplay(std::vector<ReplayModule> modules, std::vector<ReplayStep> steps);

  // The units of a step for the matrix with that number.
  std::vector<UnitUse> units_of(const ReplayStep& step, std::size_t matrix) const;
  std::vector<UnitUse> units_of(const ReplayStep& step) const;
  std::vector<std::size_t> all_units_of(std::size_t module) const;
  std::uint64_t ranked_hits(std::span<const std::size_t> slots, bool by_count) const;

  std::vector<ReplayModule> modules_;
  std::vector<ReplayStep> steps_;
  std::vector<std::size_t> firsts_;           // of each module: its first unit
  std::vector<CacheSchedule::Place> places_;  // of each unit
  std::size_t pools_ = 0;
  std::uint64_t uses_ = 0;
  std::uint64_t used_units_ = 0;
};

}  // namespace trunkline
