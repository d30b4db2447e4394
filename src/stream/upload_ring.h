// The slots of a WeightStream in the memory of a device, and what is copied into them ahead of its use.
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

// The life of a unit: an empty slot is chosen for it -> it is acquired from the host's stream, which has read
// and checked it -> its parts are copied, after what the caller's stream still did with the slot -> the last
// copy has ended: it is ready, and the host's memory is free for the next one -> it is acquired -> its holder
// releases it, with the stream that works on it.
//
// A thread does the first steps, in the order of the units; the queue's threads the end of the copies. One
// mutex guards all; neither the host's stream nor the queue is called under it.
class UploadRing {
 public:
  // `memory` has room for two slots at least.
  UploadRing(StreamCore& host, const MemoryView& memory);
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;
  ~UploadRing();

  Status start();

  // As those of StreamCore; but one holder at a time.
  Result<MemoryView> acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout);
  Status release(std::size_t unit, void* stream);
  void set_order(std::vector<std::size_t> order);

  const MemoryView& memory() const { return memory_; }

  // What the host's stream counts, but for the waiting, which is that of acquire() here.
  StreamStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::size_t kNone = RingSchedule::kNone;

  enum class State { empty, copying, ready, failed, held };
  struct Slot {
    std::byte* data = nullptr;
    std::size_t unit = kNone;
    State state = State::empty;
    bool evicting = false;   // it is empty as soon as the copying has ended
    std::size_t copies = 0;  // under way
    Fence after;             // what was done with the slot before
    std::optional<Error> error;
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
  const std::size_t most_held_;  // units of the host's stream at once, so that others can be read meanwhile

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  RingSchedule schedule_;  // locations are indices of slots
  std::size_t held_ = 0;   // units of the host's stream
  bool stopping_ = false;
  StreamStats stats_;

  std::vector<std::shared_ptr<const void>> pins_;  // of the host's memory
  std::unique_ptr<CopyQueue> copies_;  // whose destruction waits for copies that still use all above, and it
  std::thread thread_;
};

}  // namespace trunkline
