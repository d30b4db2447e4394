// One read, write or sync: the object behind a Future.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/trace.h"
#include "device/device.h"
#include "io/lane/cursor.h"
#include "io/lane/range_list.h"
#include "trunkline/error.h"
#include "trunkline/fault.h"
#include "trunkline/file.h"
#include "trunkline/future.h"
#include "trunkline/memory.h"

namespace trunkline {

// Life: created -> issued piece by piece as transfers (under the work queue's lock) -> each transfer ends
// -> when nothing is left to issue and no transfer is in flight, the operation is done, once. The first error
// wins; what was not issued by then is dropped, and what was is awaited.
class Operation {
 public:
  Operation(Op op, std::shared_ptr<EngineCore> engine, std::shared_ptr<FileCore> file, MemoryView memory,
            std::uint64_t offset, Keepalive keepalive, Fence fence = {});
  // A read of ranges, of which there is at least one, into `memory`.
  Operation(io::RangeList ranges, std::shared_ptr<EngineCore> engine, MemoryView memory, Keepalive keepalive,
            Fence fence);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // An operation that is already done.
  static std::shared_ptr<Operation> failed(Error error);
  static std::shared_ptr<Operation> finished(std::uint64_t bytes);

  Op op() const { return cursor.op; }
  const MemoryView& memory() const { return cursor.memory; }
  const Fence& fence() const { return fence_; }  // for device memory; the operation's copies come after it

  // --- the waiting side, any thread
  bool done() const;
  bool wait(Future::Timeout timeout) const;
  Result<std::uint64_t> result() const;  // once done
  void on_done(std::function<void()> callback);
  std::string description() const;  // empty once done
  std::uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }

  // Drops the part of this operation that the work queue still holds; it ends with `error` unless it already
  // has one. False when nothing was left to drop.
  bool drop_unissued(Error error);

  // --- the moving side
  // Whether an error or a cancellation has made further transfers pointless.
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  void fail(Error error);
  void add_bytes(std::uint64_t bytes) { bytes_done_.fetch_add(bytes, std::memory_order_relaxed); }

  // References: one for the part that is not issued yet, one for each transfer in flight. Releasing the last
  // one completes the operation.
  void add_ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release_ref();

  // Separates the issued part from the rest. Guarded by the work queue's lock.
  io::Cursor cursor;

  std::uint64_t block_bytes = 0;  // of its largest piece; 0: the engine's

  // To be passed to FileCore::end() (from FileCore::begin).
  unsigned write_epoch = 0;

 private:
  void complete();
  std::uint64_t requested_bytes() const;
  void trace_end(FileCore& file, const std::optional<Error>& error) const;
  bool belongs_to_parent() const;

  // Of forks: in a child nothing moves any more, and the lock may never be released.
  const unsigned generation_;

  const std::uint64_t trace_start_ns_;  // 0 while no trace is recorded
  const trace::ThreadNumber trace_caller_;

  std::shared_ptr<EngineCore> engine_;  // these two and the memory are released at completion
  std::shared_ptr<FileCore> file_;      // of ranges: the first one's
  io::RangeList ranges_;                // or none
  Keepalive keepalive_;
  Fence fence_;

  std::atomic<std::uint64_t> references_{1};
  std::atomic<std::uint64_t> bytes_done_{0};
  std::atomic<bool> aborted_{false};

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::optional<Error> error_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace trunkline
