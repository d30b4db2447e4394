#include "io/lane/work_queue.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/trace.h"
#include "base/waits.h"
#include "io/lane/transfer_trace.h"

namespace trunkline::io {
namespace {

void report_wait(std::uint64_t began_ns, std::size_t capacity) {
  const std::uint64_t now = trace::now();
  trace::record({.kind = &kQueueWait, .start_ns = began_ns, .end_ns = now});
  if (now - began_ns > kLongWaitNs) {
    log::info(log::Component::engine, "waited {:.1f} s for room in the queue, which holds {} operations",
              static_cast<double>(now - began_ns) / 1e9, capacity);
  }
}

}  // namespace

std::size_t WorkQueue::push(std::span<const std::shared_ptr<Operation>> operations, Future::Timeout timeout) {
  std::unique_lock lock(mutex_);
  const auto ready = [this] { return closed_.load() || operations_.size() < capacity_; };
  const std::uint64_t began_ns = ready() ? 0 : trace::now();
  const bool has_room = !timeout || room_.wait_for(lock, *timeout, ready);
  if (!timeout) room_.wait(lock, ready);
  if (!has_room || closed_.load()) return 0;
  const std::size_t count = std::min(operations.size(), capacity_ - operations_.size());
  operations_.insert(operations_.end(), operations.begin(),
                     operations.begin() + static_cast<std::ptrdiff_t>(count));
  size_.store(operations_.size());
  lock.unlock();
  if (began_ns != 0) report_wait(began_ns, capacity_);
  return count;
}

void WorkQueue::pop_front_locked() {
  operations_.pop_front();
  size_.store(operations_.size());
  room_.notify_one();
}

Transfer WorkQueue::take() {
  Transfer transfer;
  // These operations end outside the lock, since completing runs callbacks.
  std::vector<std::shared_ptr<Operation>> ended;
  {
    const std::scoped_lock lock(mutex_);
    while (!operations_.empty() && transfer.operation == nullptr) {
      std::shared_ptr<Operation>& front = operations_.front();
      const std::uint64_t block_bytes = front->block_bytes != 0 ? front->block_bytes : block_bytes_;
      const bool found = !front->aborted() && front->cursor.next(block_bytes, transfer);
      if (found && !front->cursor.exhausted()) {
        front->add_ref();
        transfer.operation = front;
      } else if (found) {  // the queue's reference becomes that of the transfer
        transfer.operation = std::move(front);
        pop_front_locked();
      } else {
        ended.push_back(std::move(front));
        pop_front_locked();
      }
    }
  }
  for (const auto& operation : ended) operation->release_ref();
  return transfer;
}

bool WorkQueue::drop(Operation& operation, Error error) {
  std::shared_ptr<Operation> dropped;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = std::ranges::find_if(
        operations_, [&](const auto& candidate) { return candidate.get() == &operation; });
    if (found == operations_.end() || operation.aborted()) return false;
    dropped = std::move(*found);
    operations_.erase(found);
    size_.store(operations_.size());
    room_.notify_one();
    dropped->fail(std::move(error));
  }
  dropped->release_ref();
  return true;
}

void WorkQueue::close() {
  const std::scoped_lock lock(mutex_);
  closed_.store(true);
  room_.notify_all();
}

}  // namespace trunkline::io
