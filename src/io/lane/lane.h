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

// The thread repeats three phases: submit (take transfers while there is room), reap (wait for completions),
// and finish (handle each result: resume, retry, copy out, release). Meanwhile device memory is copied:
// before a write is submitted, and after a read. Only the lane's thread accesses its transfers, so they need
// no lock.
class Lane {
 public:
  Lane(const LaneOptions& options, WorkQueue& queue) : options_(options), queue_(queue) {}
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane();

  // Starts the thread and sets up the backend on it.
  Status start();

  // Wakes the lane if it sleeps and could submit more; returns whether it did.
  bool wake_if_wants_work();

  // Ends the lane once the queue is empty and all of its transfers have completed.
  void join();
  // Like join(), but returns false at the deadline. Then the lane still runs and must not be destroyed; call
  // this again to go on waiting. One caller at a time.
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
  unsigned min_completions() const;
  Result<bool> prepare(Transfer& transfer);
  void submit(Transfer&& transfer);
  void push(Transfer& transfer, std::uint32_t tag);
  void finish_device_transfers();
  void finish_copy(CopyQueue::Completion& completion);
  void finish_gds(GdsQueue::Completion& completion);
  void move_rest_through_slot(std::uint32_t tag, std::uint64_t moved);
  void count_moved(const Transfer& transfer);
  void read_one_by_one(Transfer transfer);
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
  std::uint64_t phase_ns_ = 0;  // when this phase began: the clock is read for many transfers at once
  std::optional<Transfer> waiting_for_slot_;  // must bounce, and waits for a free slot
  std::uint64_t slot_wait_start_ns_ = 0;
  std::deque<Transfer> retry_queue_;  // what GPUDirect Storage did not move
  std::promise<void> ended_;
  // Obtained once: a promise provides only one future, and join_until() may be called again.
  const std::future<void> has_ended_ = ended_.get_future();
  std::thread thread_;
};

}  // namespace trunkline::io
