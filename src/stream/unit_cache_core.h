// The slots behind a UnitCache, and the reads into them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "stream/cache_schedule.h"
#include "stream/unit_source.h"
#include "trunkline/unit_cache.h"

namespace trunkline {

// Life of a unit: the schedule chooses its slot, and reads of its parts are submitted -> the last one has
// arrived, and the unit is ready -> it is acquired, which verifies it first -> its last holder releases it,
// and it is ready again, without being verified -> the schedule gives its slot to another unit.
//
// One mutex guards all of it. Nothing that may run a completion (submitting, cancelling) happens under it.
class UnitCacheCore {
 public:
  UnitCacheCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                std::vector<CacheSchedule::Place> places, CachePlacement placement,
                const UnitCacheOptions& options);
  UnitCacheCore(const UnitCacheCore&) = delete;
  UnitCacheCore& operator=(const UnitCacheCore&) = delete;
  ~UnitCacheCore();

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
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kNone = CacheSchedule::kNone;

  enum class State {
    empty,
    reading,
    ready,
    failed,    // `error` has the reason, for the thread that acquires the unit
    checking,  // by the thread that acquires it
    held,
  };
  struct Slot {
    std::byte* data = nullptr;
    std::size_t unit = kNone;
    State state = State::empty;
    bool is_checked = false;  // the unit was verified since it was read
    std::size_t holders = 0;
    std::size_t waiters = 0;
    std::size_t pending = 0;         // parts in flight
    std::uint64_t file_version = 0;  // of the files, before they were read: UnitSource
    std::vector<Future> futures;     // of the read
    std::optional<Error> error;
    std::uint64_t trace_start_ns = 0;  // of the reading; 0 while no trace is recorded
    trace::ThreadNumber trace_caller = 0;
  };
  // Measures a wait of acquire() from its first wait() on.
  struct Waiting {
    std::optional<Clock::time_point> since;
    std::optional<trace::Span> span;
  };

  Status check_unit(std::size_t unit) const;
  Slot* slot_of(std::size_t unit);
  void update(Slot& slot);

  void read_ahead(Lock& lock);
  void read(Lock& lock, std::span<const CacheSchedule::Read> reads);
  void assign(const CacheSchedule::Read& read);
  void arrived(Slot& slot, const Result<std::uint64_t>& result);
  Slot* available(std::span<const std::size_t> units);
  Status bring(Lock& lock, std::span<const std::size_t> units);
  bool wait_for(Lock& lock, std::span<const std::size_t> units,
                const std::optional<Clock::time_point>& deadline, Waiting& waiting);
  void stop_waiting(Waiting& waiting, const std::string& name);
  Result<UnitCache::Acquired> take(Lock& lock, Slot& slot);
  Status check(const Slot& slot);
  void empty(Slot& slot);
  void drop_unchecked();

  UnitSource source_;
  const std::vector<CacheSchedule::Place> places_;
  const CachePlacement placement_;
  Buffer buffer_;
  MemoryView memory_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  CacheSchedule schedule_;
  std::vector<Slot> slots_;
  std::size_t under_way_ = 0;        // reads in flight, and threads that submit some
  std::size_t reading_ = 0;          // reads in flight
  Clock::time_point reading_since_;  // while there are any
  std::vector<std::optional<std::uint64_t>>
      checked_;  // for each unit: the file version at which its bytes were verified
  UnitCacheStats stats_;
  std::vector<UnitGroupStats> group_stats_;  // by group
};

}  // namespace trunkline
