// The slots behind a UnitCache, and the reads into them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "stream/cache_schedule.h"
#include "stream/unit_frame.h"
#include "stream/unit_loader.h"
#include "stream/unit_source.h"
#include "stream/unit_wait.h"
#include "trunkline/unit_cache.h"

namespace trunkline {

// Life of a unit: the schedule chooses its slot, and it is loaded -> it has arrived, and is ready -> it is
// acquired, which verifies it first -> its last holder releases it, and it is ready again, without being
// verified -> the schedule gives its slot to another unit.
//
// One mutex guards all of it, the loader too. Nothing that may run a completion (submitting, cancelling)
// happens under it.
class UnitCacheCore {
 public:
  UnitCacheCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                std::vector<CacheSchedule::Place> places, CachePlacement placement,
                const UnitCacheOptions& options);
  UnitCacheCore(const UnitCacheCore&) = delete;
  UnitCacheCore& operator=(const UnitCacheCore&) = delete;
  ~UnitCacheCore() = default;

  Status start();  // allocates memory

  Status request(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens,
                 std::span<const std::size_t> expected);
  Result<UnitCache::Acquired> acquire(std::span<const std::size_t> units,
                                      std::optional<std::chrono::nanoseconds> timeout);
  Status release(std::size_t unit);

  const MemoryView& memory() const { return memory_; }
  const CachePlacement& placement() const { return placement_; }
  UnitCacheStats stats() const;
  std::vector<UnitGroupStats> group_stats() const;
  std::vector<double> use_rates() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using State = UnitFrame::State;
  static constexpr std::size_t kNone = CacheSchedule::kNone;

  UnitFrame* slot_of(std::size_t unit);
  void update(UnitFrame& slot);

  void read_ahead(Lock& lock);
  UnitFrame* assign(const CacheSchedule::Read& read);
  void read_ended(UnitFrame& slot);
  UnitFrame* available(std::span<const std::size_t> units);
  Status bring(Lock& lock, std::span<const std::size_t> units);
  bool wait(Lock& lock, std::span<const std::size_t> units, UnitWait& waiting);
  Result<UnitCache::Acquired> take(Lock& lock, UnitFrame& slot);
  void empty(UnitFrame& slot);
  void drop_unchecked();

  UnitSource source_;
  const std::vector<CacheSchedule::Place> places_;
  const CachePlacement placement_;
  Buffer buffer_;
  MemoryView memory_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  CacheSchedule schedule_;
  std::vector<UnitFrame> slots_;
  UnitCacheStats stats_;                     // what the loader does not count
  std::vector<UnitGroupStats> group_stats_;  // by group
  UnitLoader loader_;                        // destroyed first: waits for reads that use everything above
};

}  // namespace trunkline
