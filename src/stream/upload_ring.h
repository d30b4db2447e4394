// The device memory slots of a WeightStream, and the copies into them ahead of use.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "device/device.h"
#include "stream/ring_schedule.h"
#include "stream/stream_core.h"

namespace trunkline {

// Life of a unit: an empty slot is chosen for it -> it is acquired from the host's stream, which has read and
// verified it -> its parts are copied, after any work that the caller's stream still does with the slot ->
// the last copy has ended: it is ready, and the host memory is free for the next one -> it is acquired -> its
// holder releases it, naming the stream that works on it.
//
// One thread does the first steps, in the order of the units; the copy queue's threads handle the end of the
// copies. One mutex guards everything; neither the host's stream nor the queue is called under it.
class UploadRing {
 public:
  // `memory` has room for at least two slots.
  UploadRing(StreamCore& host, const MemoryView& memory);
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;
  ~UploadRing();

  Status start();

  // Like those of StreamCore, but with one holder at a time.
  Result<MemoryView> acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout);
  Status release(std::size_t unit, void* stream);
  void set_order(std::vector<std::size_t> order);

  const MemoryView& memory() const { return memory_; }

  // The counts of the host's stream, except that waiting is measured in acquire() here.
  StreamStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::size_t kNone = RingSchedule::kNone;

  enum class State { empty, copying, ready, failed, held };
  struct Slot {
    std::byte* data = nullptr;
    std::size_t unit = kNone;
    State state = State::empty;
    bool evicting = false;   // becomes empty as soon as its copies have ended
    std::size_t copies = 0;  // in flight
    Fence after;             // earlier work on the slot
    std::optional<Error> error;
    std::uint64_t trace_start_ns = 0;  // of the copying; 0 while no trace is recorded
  };

  void work();
  Slot* next_slot();
  void upload(Lock& lock, Slot& slot);
  Result<MemoryView> acquire_from_host(std::size_t unit);
  void copies_ended();
  void settle(Slot& slot);
  void empty(Slot& slot);
  Status reprioritize(std::size_t unit);
  void evict(Slot& slot);
  std::vector<SlotUse> slot_uses() const;

  StreamCore& host_;
  const MemoryView memory_;
  const std::vector<StreamUnit>& units_;
  const std::size_t max_held_;  // units of the host's stream held at once, leaving room to read others

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  RingSchedule schedule_;  // locations are indices of slots
  std::size_t held_ = 0;   // units of the host's stream that are held
  bool stopping_ = false;
  StreamStats stats_;

  std::vector<std::shared_ptr<const void>> pins_;  // of the host's memory
  std::unique_ptr<CopyQueue> copies_;  // destroyed first: waits for copies that still use everything above
  std::thread thread_;
};

}  // namespace trunkline
