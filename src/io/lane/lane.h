// A lane: one thread that drives one backend.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "device/device.h"
#include "io/backends/backend.h"
#include "io/gpu/device_transfers.h"
#include "io/lane/counters.h"
#include "io/lane/transfer.h"
#include "io/lane/work_queue.h"
#include "io/refusal_log.h"
#include "mem/pinned_budget.h"
#include "mem/slot_pool.h"

namespace trunkline::io {

class FaultPlan;  // io/backends/faulty.h

struct LaneOptions {
  BackendKind backend;
  unsigned index;
  unsigned depth;            // transfers in flight
  std::uint64_t slot_bytes;  // of a bounce slot: one block
  unsigned slots;            // at most, allocated when the first transfer must bounce
  std::shared_ptr<PinnedBudget> budget;
  GpuPath gpu;
  std::shared_ptr<FaultPlan> faults;  // or null
  RefusalLog* refusals;               // of the engine
};

// Three phases, never mixed: submit (take transfers while there is room), reap (wait for completions), finish
// (judge each result; resume, retry, copy out, release). Device memory is copied concurrently with all that:
// before a write is sent, and after a read. Only the lane's thread touches its transfers, so they need no
// lock.
class Lane {
 public:
  Lane(const LaneOptions& options, WorkQueue& queue) : options_(options), queue_(queue) {}
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane();

  // Starts the thread and sets up the backend on it.
  Status start();

  // Returns whether the lane was asleep with room to spare, and has now been woken.
  bool wake_if_hungry();

  // Ends the lane when the queue is empty and everything that it sent has completed.
  void join();
  // Like join(), but gives up at the deadline: then the lane continues to run, and must not be destroyed;
  // call it again to continue waiting. One caller at a time.
  bool join_until(std::chrono::steady_clock::time_point deadline);

  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

  const Counters& counters() const { return counters_; }
  Counters& counters() { return counters_; }
  std::vector<std::string> features() const { return features_; }

 private:
  void run(std::promise<Status>& started);
  Transfer next_transfer();
  void submit_ready();
  void end_slot_wait(const Transfer& transfer);
  unsigned wanted() const;
  Result<bool> prepare(Transfer& transfer);
  void send(Transfer&& transfer);
  void push(Transfer& transfer, std::uint32_t tag);
  void finish_device_transfers();
  void finish_copy(CopyQueue::Ended& ended);
  void finish_gds(GdsQueue::Ended& ended);
  void copy_rest(std::uint32_t tag, std::uint64_t moved);
  void count_moved(const Transfer& transfer);
  void finish(const Completion& completion);
  void release(std::uint32_t tag);
  SlotPool& slots();

  const LaneOptions options_;
  WorkQueue& queue_;
  Counters counters_;
  std::vector<std::string> features_;
  std::unique_ptr<Backend> backend_;
  std::atomic<bool> wants_work_{false};
  std::atomic<bool> stopping_{false};

  std::unique_ptr<SlotPool> slots_;
  std::atomic<bool> registered_{false};
  DeviceTransfers devices_{[this] { backend_->wake(); }, *options_.refusals};

  std::vector<Transfer> transfers_;  // by tag
  std::vector<std::uint32_t> free_tags_;
  std::optional<Transfer> waiting_for_slot_;  // must bounce, and waits for a free slot
  std::uint64_t waits_since_ns_ = 0;
  std::deque<Transfer> retry_queue_;  // the rest of what devices did not move directly
  std::promise<void> ended_;
  // Obtained once: a promise provides only one future, and join_until() may be called again.
  const std::future<void> has_ended_ = ended_.get_future();
  std::thread thread_;
};

}  // namespace trunkline::io
