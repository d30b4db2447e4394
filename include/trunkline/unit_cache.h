// Weights larger than memory of which each step uses few: units that are read when a step names them, and of
// which those that are used most stay in memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "trunkline/engine.h"
#include "trunkline/file.h"
#include "trunkline/stream.h"

namespace trunkline {

// A unit of a cache: for example one matrix of an expert.
struct CacheUnit {
  StreamUnit unit;
  std::size_t group = 0;  // units among which a step chooses: those of a layer
  std::size_t pool = 0;   // units that share slots, best of about the same size
};

// How many tokens of a step use a unit.
struct UnitUse {
  std::size_t unit = 0;
  std::uint64_t tokens = 1;
};

// How memory is divided among pools.
struct CachePlacement {
  std::vector<std::size_t> slots;         // by pool
  std::vector<std::uint64_t> slot_bytes;  // by pool: of its largest unit, rounded up to pages
  std::uint64_t memory_bytes = 0;         // of all slots
};

// Divides at most `memory_bytes`, so that each pool has slots for about the same share of its units: two at
// least, and no more than it has units. `pools`: of each unit. Fails with out_of_budget when two slots for
// each pool do not fit; the message says how much suffices.
Result<CachePlacement> place_pools(std::span<const std::uint64_t> unit_bytes,
                                   std::span<const std::size_t> pools, std::uint64_t memory_bytes);

struct UnitCacheOptions {
  std::uint64_t memory_bytes = std::numeric_limits<std::uint64_t>::max();  // of all slots
  StreamVerify verify = StreamVerify::once;
  // How many units of each pool are read for a request before the first of them has been used; they take
  // slots of units that may be used again.
  std::size_t read_ahead = 16;
  // What use_rates() of an earlier cache of the same units returned: decides what is evicted until this one
  // knows better. Empty: nothing is known.
  std::vector<double> use_rates = {};
};

struct UnitCacheStats {
  std::uint64_t requests = 0;  // steps of groups
  std::uint64_t hits = 0;      // requested units that were in memory, or being read
  std::uint64_t misses = 0;    // requested units that were not
  std::uint64_t units_read = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t evictions = 0;
  std::uint64_t acquired = 0;   // units handed out
  std::uint64_t waited = 0;     // calls of acquire() that had to wait
  std::uint64_t wait_ns = 0;    // time spent waiting for storage
  std::uint64_t verify_ns = 0;  // time spent on checksums
  std::uint64_t read_ns = 0;    // time during which anything was being read
  std::uint64_t failed = 0;     // units that could not be read
};

// What UnitCacheStats counts, of the steps of one group, and of its units.
struct UnitGroupStats {
  std::uint64_t requests = 0;
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t units_read = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t evictions = 0;  // units of the group that were evicted
};

class UnitCacheCore;  // src/stream/unit_cache_core.h

// A step requests its units, which starts reading all that are not in memory (as far as read_ahead and slots
// allow), then acquires, uses and releases each. Any unit can also be acquired without a request. What is
// evicted is what is used least by the steps of its group, lately and in the long run. Every member function
// is thread-safe; steps that run at the same time replace each other's requests, which costs time and nothing
// else. Movable, not copyable; destruction cancels reads in flight and waits for them.
class UnitCache {
 public:
  // Reads nothing yet. Fails with invalid_argument for inconsistent units or use_rates, and with
  // out_of_budget when two slots for each pool do not fit in memory_bytes.
  static Result<UnitCache> open(const Engine& engine, std::vector<File> files, std::vector<CacheUnit> units,
                                const UnitCacheOptions& options = {});

  UnitCache(UnitCache&&) noexcept;
  UnitCache& operator=(UnitCache&&) noexcept;
  ~UnitCache();

  // A step of `tokens` tokens will use these units of a group, about in this order. Replaces the request
  // before. `expected`: units that the next request may name; they are read when all others have been.
  Status request(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens = 1,
                 std::span<const std::size_t> expected = {});

  struct Acquired {
    std::size_t unit = 0;
    MemoryView memory;  // valid to read until the unit's release
  };
  // The first of the units that is in memory; otherwise waits until one of them is. A failed read is reported
  // here, once: acquiring the unit again reads it again. corrupt when bytes do not match their checksum;
  // timed_out when none arrived in time; invalid_argument when all slots of the pool hold acquired units. A
  // unit that is acquired several times must be released as often.
  Result<Acquired> acquire(std::span<const std::size_t> units,
                           std::optional<std::chrono::nanoseconds> timeout = std::nullopt);

  // The unit has been used: its memory may be reused. invalid_argument when it is not acquired.
  Status release(std::size_t unit);

  // The memory that units are handed out from.
  const MemoryView& memory() const;

  const CachePlacement& placement() const;
  UnitCacheStats stats() const;
  std::vector<UnitGroupStats> group_stats() const;  // by group

  // For each unit a number from 0 to 1 that grows with the share of its group's tokens that used it, over
  // about the last thousand and what UnitCacheOptions::use_rates said before.
  std::vector<double> use_rates() const;

 private:
  explicit UnitCache(std::unique_ptr<UnitCacheCore> core);

  std::unique_ptr<UnitCacheCore> core_;
};

}  // namespace trunkline
