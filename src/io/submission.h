// A batch of requests that is being submitted to an engine's queue.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "io/operation.h"
#include "trunkline/engine.h"
#include "trunkline/future.h"

namespace trunkline::io {

// Submits a batch in steps. The queue gets room when a device completes something, which a hung device never
// does: a caller that must be able to stop submits with a timeout and decides after each step. For use by one
// thread.
class Submission {
 public:
  // `requests` must outlive this.
  Submission(std::shared_ptr<EngineCore> engine, std::span<const Request> requests);
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;
  ~Submission() { give_up(); }

  // Submits requests in order while there is room, and waits up to `timeout` (nullopt: without limit) for
  // more. Returns whether all are submitted. Invalid requests, and those whose engine is closed meanwhile,
  // count as submitted: their Futures report the error.
  bool advance(Future::Timeout timeout);

  // Cancels requests that the queue has not accepted; those that already have a Future end as cancelled.
  void give_up();

  // Of the requests so far, in order: of all of them once advance() has returned true.
  std::vector<Future> take_futures() { return std::move(futures_); }

 private:
  void make_next();
  void end_all_unsent();

  const std::shared_ptr<EngineCore> engine_;
  const std::span<const Request> requests_;
  std::size_t next_ = 0;
  std::vector<Future> futures_;
  std::vector<std::shared_ptr<Operation>> made_;  // begun in their files
  std::size_t sent_ = 0;                          // how many of made_ were sent
};

// Ends an operation that found the queue closed.
void end_unsent(Operation& operation);

}  // namespace trunkline::io
