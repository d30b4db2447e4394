// The operations that are not fully issued yet, in order. Lanes take transfers from the queue when they have
// room, which balances the load. Callers wait when it is full, so that its memory stays bounded.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "io/lane/transfer.h"
#include "io/operation.h"

namespace trunkline::io {

class WorkQueue {
 public:
  // `block_bytes`: of the largest piece, of operations that have none of their own; `capacity`: in
  // operations.
  WorkQueue(std::uint64_t block_bytes, std::size_t capacity)
      : block_bytes_(block_bytes), capacity_(capacity) {}

  // Appends as many as there is room for, and waits up to `timeout` (nullopt: without limit) for room for at
  // least one. Returns how many were appended: 0 once the queue is closed, or after the timeout.
  std::size_t push(std::span<const std::shared_ptr<Operation>> operations,
                   Future::Timeout timeout = std::nullopt);

  // The next transfer, or none (operation == nullptr). It holds a reference to its operation.
  Transfer take();

  // Removes `operation` and ends it with `error`, unless all of it was issued.
  bool drop(Operation& operation, Error error);

  bool empty() const { return size_.load(std::memory_order_seq_cst) == 0; }

  // No more pushes; queued operations are still taken.
  void close();
  bool closed() const { return closed_.load(std::memory_order_seq_cst); }

 private:
  void pop_front_locked();

  const std::uint64_t block_bytes_;
  const std::size_t capacity_;
  std::mutex mutex_;
  std::condition_variable room_;
  std::deque<std::shared_ptr<Operation>> operations_;
  std::atomic<std::size_t> size_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace trunkline::io
