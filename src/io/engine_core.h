// The engine behind Engine handles: its queue, its lanes, and the shortcut past them for small blocking
// operations.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "io/file/memory_files.h"
#include "io/lane/counters.h"
#include "io/lane/inline_runner.h"
#include "io/lane/lane.h"
#include "io/lane/work_queue.h"
#include "io/refusal_log.h"
#include "mem/pinned_budget.h"
#include "mem/slot_pool.h"
#include "mem/staging_pool.h"
#include "trunkline/engine.h"
#include "tuning/tuning_table.h"

namespace trunkline {

class EngineCore : public std::enable_shared_from_this<EngineCore> {
 public:
  static Result<std::shared_ptr<EngineCore>> create(const EngineOptions& options);
  // `tunings`: nullptr where the engine follows none.
  EngineCore(const EngineOptions& options, const EngineConfig& config,
             std::shared_ptr<const tuning::TuningTable> tunings, bool block_was_passed);
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;
  ~EngineCore() = default;

  const EngineConfig& config() const { return config_; }
  const std::shared_ptr<PinnedBudget>& budget() const { return budget_; }
  const std::shared_ptr<StagingPool>& staging() const { return staging_; }
  io::WorkQueue& queue() { return queue_; }
  io::MemoryFiles& memory_files() { return memory_files_; }
  const tuning::TuningTable* tunings() const { return tunings_.get(); }
  bool block_was_passed() const { return block_was_passed_; }  // as an option, which wins over tunings

  std::vector<Future> submit(std::span<const Request> requests);

  // The steps of a Submission (io/submission.h). make_operation() returns an operation that has begun in its
  // file, or is already done. enqueue() pushes operations to the queue, like WorkQueue::push, and wakes the
  // lanes.
  Result<std::shared_ptr<Operation>> make_operation(const Request& request);
  std::size_t enqueue(std::span<const std::shared_ptr<Operation>> operations, Future::Timeout timeout);

  // Makes room in the file for a write ahead of its submission, which otherwise does it: this makes system
  // calls that a device or another process can delay. Uses nothing of the request but its file and range.
  Status make_room(const std::shared_ptr<FileCore>& file, std::uint64_t offset, std::uint64_t bytes);

  // Whether a blocking operation on this memory would run on the caller's thread.
  bool runs_inline(const MemoryView& memory) const {
    return memory.device == nullptr && memory.bytes <= config_.slot_bytes && queue_.empty();
  }

  // Reads or writes on the caller's thread when that is cheapest (fits a block, nothing queued), else through
  // the lanes; returns when everything is transferred.
  Result<std::uint64_t> run(Op op, const std::shared_ptr<FileCore>& file, const MemoryView& memory,
                            std::uint64_t offset);

  // Syncs all members concurrently. The caller has begun the operation in the file; this ends it.
  Status run_sync(const std::shared_ptr<FileCore>& file);

  void count_operation(bool failed) { counters_.count_operation(failed, false); }

  EngineStats stats() const;

  // The latency of every transfer of the lanes from now on, of up to `most` a lane, until they are taken.
  void start_latency_logs(std::size_t most);
  std::vector<io::LatencyLog> take_latency_logs();

  // How many reads are in flight from now on, until it is taken: an element for each lane, and one for reads
  // on callers' threads.
  void start_reads_in_flight();
  std::vector<io::ReadsInFlight> take_reads_in_flight();

  std::vector<Refusal> refusals() const;

  // Finishes what was submitted and joins the lanes. Idempotent; a second caller waits for the first.
  void close();

  // For the end of the process: like close(), but only as long as `keep_waiting` returns true. It is called
  // several times a second, with the number of transfers that have completed. Returns false when operations
  // are still in flight: then the engine must not be destroyed, and another call resumes the wait.
  bool close_while(const std::function<bool(std::uint64_t completed)>& keep_waiting);

  // Fails with `closed` when this engine accepts no operations (any more, or in a forked child).
  Status usable() const;

  bool is_lane_thread() const;

  // In a forked child nothing may touch the parent's threads, not even to destroy them.
  bool belongs_to_parent() const;

 private:
  struct Origin;  // of the options that an engine is created with
  static Result<std::shared_ptr<EngineCore>> create(const EngineOptions& options, const Origin& origin);
  Result<std::shared_ptr<Operation>> make_read_of_ranges(const Request& request);
  Result<Fence> fence_for(const MemoryView& memory);
  Result<bool> can_use_gds(FileCore& file, const MemoryView& memory);
  Status start_lanes(BackendKind kind);
  void log_choice(std::string_view why) const;
  unsigned bounce_slots(unsigned most) const;
  Result<std::uint64_t> run_inline(FileCore& file, Op op, const MemoryView& memory, std::uint64_t offset);
  std::uint64_t completed_transfers() const;
  bool join_lanes_until(std::chrono::steady_clock::time_point deadline);

  const unsigned generation_;
  EngineConfig config_;
  std::shared_ptr<io::FaultPlan> faults_;
  std::shared_ptr<PinnedBudget> budget_;
  std::shared_ptr<StagingPool> staging_;
  io::WorkQueue queue_;
  io::MemoryFiles memory_files_;
  const std::shared_ptr<const tuning::TuningTable> tunings_;
  const bool block_was_passed_;
  io::Counters counters_;  // of inline work, and of whole operations
  io::RefusalLog refusals_;
  std::vector<std::unique_ptr<io::Lane>> lanes_;
  std::vector<Refusal> refused_backends_;

  io::InlineRunner inline_runner_;
  std::mutex close_mutex_;
};

namespace io {

// Validates the options before anything is allocated, and fills in the defaults.
Result<EngineConfig> resolve(const EngineOptions& options);

}  // namespace io
}  // namespace trunkline
