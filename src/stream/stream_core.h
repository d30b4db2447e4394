// The ring of slots behind a WeightStream, and the reads into it.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "stream/ring_schedule.h"
#include "stream/unit_source.h"
#include "trunkline/stream.h"

namespace trunkline {

// Life of a unit: its frame is chosen (its own when it is resident, else an empty slot) and reads of its
// parts are submitted -> the last one has arrived, and the unit is ready -> it is acquired, which verifies it
// first -> its last holder releases it, and its slot is empty again.
//
// One mutex guards all of it. Nothing that may run a completion (submitting, cancelling) happens under it.
class StreamCore {
 public:
  StreamCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
             StreamPlacement placement, StreamVerify verify);
  StreamCore(const StreamCore&) = delete;
  StreamCore& operator=(const StreamCore&) = delete;
  ~StreamCore();

  Status start();  // allocates memory and starts reading

  Result<MemoryView> acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout);
  Status release(std::size_t unit);
  Status set_order(std::vector<std::size_t> order);

  std::span<const MemoryView> memory() const { return memory_; }
  const std::vector<StreamUnit>& units() const { return units_; }
  const StreamPlacement& placement() const { return placement_; }
  StreamStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Deadline = std::optional<std::chrono::steady_clock::time_point>;
  static constexpr std::size_t kNone = RingSchedule::kNone;

  enum class State {
    empty,
    reading,
    ready,
    failed,    // `error` has the reason, for threads that acquire the unit
    checking,  // by the thread that acquires it
    held,
  };
  // Memory for one unit: a slot, or a resident unit's own memory.
  struct Frame {
    std::byte* data = nullptr;
    std::size_t unit = kNone;
    State state = State::empty;
    bool evicting = false;  // becomes empty as soon as its read has ended
    std::size_t holders = 0;
    std::size_t waiters = 0;
    std::size_t pending = 0;         // parts in flight
    std::uint64_t reading = 0;       // number of the read; distinguishes it from later ones in this frame
    std::uint64_t file_version = 0;  // of the files, before they were read: FileVersions
    std::vector<Future> futures;     // of the read
    std::optional<Error> error;
    std::uint64_t trace_start_ns = 0;  // of the reading; 0 while no trace is recorded
    trace::ThreadNumber trace_caller = 0;
  };

  Status check_unit(std::size_t unit) const;
  bool is_slot(const Frame& frame) const { return frame_index(frame) < placement_.slots; }
  std::size_t frame_index(const Frame& frame) const {
    return static_cast<std::size_t>(&frame - frames_.data());
  }
  Frame* frame_of(std::size_t unit);
  Frame* room_for(std::size_t unit);
  std::span<const SlotUse> slot_uses();

  void read_ahead(Lock& lock);
  void read(Lock& lock, Frame& frame, std::size_t unit);
  void arrived(Frame& frame, const Result<std::uint64_t>& result);
  Status reprioritize(Lock& lock, std::size_t unit);
  void evict_behind(Lock& lock, std::size_t unit);
  void make_room(Lock& lock, std::size_t unit);
  static bool may_evict(const Frame& frame);
  void evict(Lock& lock, const std::vector<Frame*>& frames);
  void evict_unchecked(Lock& lock);
  void empty(Frame& frame);
  bool wait(Lock& lock, const Deadline& deadline);
  Result<MemoryView> take(Lock& lock, Frame& frame);
  Status check(const Frame& frame);

  UnitSource source_;
  const std::vector<StreamUnit>& units_;
  const StreamPlacement placement_;
  Buffer slots_;
  Buffer resident_;
  std::array<MemoryView, 2> memory_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Frame> frames_;                // the slots, then one for each resident unit
  std::vector<std::size_t> resident_frame_;  // for each resident unit: index of its frame
  RingSchedule schedule_;                    // locations are indices of frames
  std::vector<SlotUse> uses_;                // slot_uses()
  std::size_t under_way_ = 0;                // reads in flight, and threads that submit or cancel some
  std::size_t reading_ = 0;                  // reads in flight
  std::chrono::steady_clock::time_point reading_since_;  // while there are any
  std::uint64_t readings_ = 0;
  std::vector<std::optional<std::uint64_t>>
      checked_;  // for each unit: the file version at which its bytes were verified
  StreamStats stats_;
};

}  // namespace trunkline
