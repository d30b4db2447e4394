// The pending result of one operation.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "trunkline/error.h"

namespace trunkline {

class Operation;  // src/io/operation.h

// A handle to one operation; copies share it. Every member function is thread-safe. Dropping the last handle
// does not cancel: the operation continues and keeps its file and Keepalive until it is done.
//
// In the child of a fork, pending operations count as done, with the error `closed`: they continue in the
// parent, on the parent's memory.
class Future {
 public:
  using Timeout = std::optional<std::chrono::nanoseconds>;  // nullopt: no limit

  Future() = default;
  explicit Future(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  // False only for a default-constructed Future, on which nothing else may be called.
  bool valid() const { return operation_ != nullptr; }

  bool done() const;

  // True when the operation is done, false after the timeout.
  bool wait(Timeout timeout = std::nullopt) const;

  // Bytes moved, or the first error of any part of the operation; timed_out after the timeout.
  // Once this returns anything but timed_out, neither kernel nor device touches the memory any more.
  Result<std::uint64_t> result(Timeout timeout = std::nullopt) const;

  // Drops the transfers that were not sent yet. Those already sent are awaited before the operation ends with
  // `cancelled`. Returns whether anything was dropped; if not, the operation ends as if it had not been
  // cancelled.
  bool cancel();

  // Runs `fn` once when the operation is done, on the thread that completes it (immediately, on the calling
  // thread, if it is done already). `fn` must be short and must not block or wait for other operations.
  void on_done(std::function<void()> fn);

  // What the operation does, for messages: "reading 4096 bytes at 0 of /data/a.bin". Empty once it is done.
  std::string description() const;

  // Bytes that have arrived so far; equals the result once done.
  std::uint64_t bytes_done() const;

 private:
  std::shared_ptr<Operation> operation_;
};

// Waits for all of `futures`; returns the sum of bytes moved, or the first error in the order of the list
// (the others are still awaited). timed_out after the timeout.
Result<std::uint64_t> wait_all(std::span<const Future> futures, Future::Timeout timeout = std::nullopt);

}  // namespace trunkline
