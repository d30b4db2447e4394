// The ring of slots behind a WeightStream, and the reads into it.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "stream/ring_schedule.h"
#include "stream/unit_frame.h"
#include "stream/unit_loader.h"
#include "stream/unit_source.h"
#include "trunkline/stream.h"

namespace trunkline {

// Life of a unit: its frame is chosen (its own when it is resident, else an empty slot) and it is loaded ->
// it has arrived, and is ready -> it is acquired, which verifies it first -> its last holder releases it, and
// its slot is empty again.
//
// One mutex guards all of it, the loader too. Nothing that may run a completion (submitting, cancelling)
// happens under it.
class StreamCore {
 public:
  StreamCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
             StreamPlacement placement, StreamVerify verify);
  StreamCore(const StreamCore&) = delete;
  StreamCore& operator=(const StreamCore&) = delete;
  ~StreamCore() = default;

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
  using State = UnitFrame::State;
  static constexpr std::size_t kNone = RingSchedule::kNone;

  bool is_slot(const UnitFrame& frame) const { return frame_index(frame) < placement_.slots; }
  std::size_t frame_index(const UnitFrame& frame) const {
    return static_cast<std::size_t>(&frame - frames_.data());
  }
  UnitFrame* frame_of(std::size_t unit);
  UnitFrame* room_for(std::size_t unit);
  std::span<const SlotUse> slot_uses();

  void read_ahead(Lock& lock);
  void read(Lock& lock, UnitFrame& frame, std::size_t unit);
  Status reprioritize(Lock& lock, std::size_t unit);
  void evict_behind(Lock& lock, std::size_t unit);
  void make_room(Lock& lock, std::size_t unit);
  static bool may_evict(const UnitFrame& frame);
  void evict(Lock& lock, const std::vector<UnitFrame*>& frames);
  void evict_unchecked(Lock& lock);
  void empty(UnitFrame& frame);
  Result<MemoryView> take(Lock& lock, UnitFrame& frame);

  UnitSource source_;
  const std::vector<StreamUnit>& units_;
  const StreamPlacement placement_;
  Buffer slots_;
  Buffer resident_;
  std::array<MemoryView, 2> memory_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<UnitFrame> frames_;            // the slots, then one for each resident unit
  std::vector<std::size_t> resident_frame_;  // for each resident unit: index of its frame
  RingSchedule schedule_;                    // locations are indices of frames
  std::vector<SlotUse> uses_;                // slot_uses()
  StreamStats stats_;                        // what the loader does not count
  UnitLoader loader_;                        // destroyed first: waits for reads that use everything above
};

}  // namespace trunkline
