#include "io/operation.h"

#include <fmt/format.h>

#include <cerrno>
#include <utility>

#include "base/trace.h"
#include "io/engine_core.h"
#include "io/file/file_core.h"
#include "io/lane/transfer_trace.h"
#include "os/fork_generation.h"

namespace trunkline {

Operation::Operation(Op op, std::shared_ptr<EngineCore> engine, std::shared_ptr<FileCore> file,
                     MemoryView memory, std::uint64_t offset, Keepalive keepalive, Fence fence)
    : cursor{.op = op, .file = file.get(), .memory = memory, .offset = offset},
      generation_(os::fork_generation()),
      trace_start_ns_(trace::start()),
      trace_caller_(trace_start_ns_ == 0 ? trace::kNoThread : trace::this_thread()),
      engine_(std::move(engine)),
      file_(std::move(file)),
      keepalive_(std::move(keepalive)),
      fence_(std::move(fence)) {}

Operation::Operation(io::RangeList ranges, std::shared_ptr<EngineCore> engine, MemoryView memory,
                     Keepalive keepalive, Fence fence)
    : Operation(Op::read, std::move(engine), ranges.items.front().file->shared_from_this(), memory,
                ranges.items.front().offset, std::move(keepalive), std::move(fence)) {
  ranges_ = std::move(ranges);
  cursor.ranges = &ranges_;
}

std::shared_ptr<Operation> Operation::failed(Error error) {
  auto operation = std::make_shared<Operation>(Op::read, nullptr, nullptr, MemoryView{}, 0, nullptr);
  operation->error_ = std::move(error);
  operation->done_ = true;
  return operation;
}

std::shared_ptr<Operation> Operation::finished(std::uint64_t bytes) {
  auto operation = std::make_shared<Operation>(Op::read, nullptr, nullptr, MemoryView{}, 0, nullptr);
  operation->bytes_done_ = bytes;
  operation->done_ = true;
  return operation;
}

bool Operation::done() const {
  if (belongs_to_parent()) return true;
  const std::scoped_lock lock(mutex_);
  return done_;
}

bool Operation::wait(Future::Timeout timeout) const {
  if (belongs_to_parent()) return true;
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return done_; };
  if (is_done()) return true;
  const trace::Span span(io::kOperationWait);
  if (!timeout) {
    changed_.wait(lock, is_done);
    return true;
  }
  // A timeout too large for the clock means no timeout.
  const auto now = std::chrono::steady_clock::now();
  if (*timeout > std::chrono::steady_clock::time_point::max() - now) {
    changed_.wait(lock, is_done);
    return true;
  }
  return changed_.wait_until(lock, now + *timeout, is_done);
}

Result<std::uint64_t> Operation::result() const {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!belongs_to_parent()) {
    lock.lock();
  } else if (!lock.try_lock() ||
             !done_) {  // one that was done before the fork has its result in the child too
    return std::unexpected(make_error(ErrorKind::closed,
                                      "the operation was submitted by the parent process before fork, and "
                                      "only the parent can wait for it"));
  }
  if (error_) return std::unexpected(*error_);
  return bytes_done_.load();
}

bool Operation::belongs_to_parent() const { return generation_ != os::fork_generation(); }

void Operation::on_done(std::function<void()> callback) {
  if (belongs_to_parent()) return;
  {
    const std::scoped_lock lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::string Operation::description() const {
  if (belongs_to_parent()) return {};
  std::shared_ptr<FileCore> file;  // released outside the lock: it may be the last reference
  {
    const std::scoped_lock lock(mutex_);
    file = file_;
  }
  if (file == nullptr) return {};
  if (op() == Op::sync) return fmt::format("fsync of {}", file->name);
  // The lanes write to none of these.
  if (cursor.ranges != nullptr)
    return fmt::format("reading {} bytes in {} ranges of {}", ranges_.bytes, ranges_.items.size(),
                       ranges_.file_count == 1 ? file->name : fmt::format("{} files", ranges_.file_count));
  return fmt::format("{} {} bytes at {} of {}", op() == Op::read ? "reading" : "writing", cursor.memory.bytes,
                     cursor.offset, file->name);
}

bool Operation::drop_unissued(Error error) {
  if (belongs_to_parent()) return false;
  std::shared_ptr<EngineCore> engine;
  {
    const std::scoped_lock lock(mutex_);
    engine = engine_;
  }
  return engine != nullptr && engine->queue().drop(*this, std::move(error));
}

void Operation::fail(Error error) {
  const std::scoped_lock lock(mutex_);
  if (!error_) error_ = std::move(error);
  aborted_.store(true, std::memory_order_release);
}

void Operation::release_ref() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) complete();
}

void Operation::trace_end(FileCore& file, const std::optional<Error>& error) const {
  trace::Event event = io::operation_event(op(), trace_start_ns_, trace_caller_);
  event.text = file.trace_text.of(file.name);
  event.offset = cursor.offset;
  event.bytes = requested_bytes();
  event.result = static_cast<std::int64_t>(bytes_done());
  if (error) event.result = error->code != 0 ? -error->code : -EIO;
  trace::record(event);
}

std::uint64_t Operation::requested_bytes() const {
  return cursor.ranges != nullptr ? ranges_.bytes : cursor.memory.bytes;
}

void Operation::complete() {
  // 1. Nothing touches the memory any more: release it and the file before anybody can learn that the
  // operation is done.
  keepalive_.reset();
  fence_.reset();
  std::shared_ptr<FileCore> file;
  std::shared_ptr<EngineCore> engine;   // may be the last reference: released when everything else is done
  engine_->count_operation(aborted());  // only this function writes to engine_
  // 2. Wake waiting threads. 3. Run callbacks.
  std::vector<std::function<void()>> callbacks;
  {
    const std::scoped_lock lock(mutex_);
    file = std::move(file_);
    engine = std::move(engine_);
    if (trace_start_ns_ != 0) trace_end(*file, error_);
    // Under the lock: a thread that waited until the file had nothing pending finds the operation done, and
    // vice versa.
    if (cursor.ranges != nullptr)
      ranges_.end();
    else
      file->end(op(), write_epoch);
    file.reset();
    done_ = true;
    callbacks = std::move(callbacks_);
  }
  changed_.notify_all();
  for (const auto& callback : callbacks) callback();
}

}  // namespace trunkline
