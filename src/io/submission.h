// A batch of requests on its way into the queue of an engine.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "io/operation.h"
#include "trunkline/engine.h"
#include "trunkline/future.h"

namespace trunkline::io {

// Submits a batch in steps. The queue has room when a device completes something, which one that hangs never
// does: a caller that must be able to stop submits with a bound and decides after each step. For one thread.
class Submission {
 public:
  // `requests` must outlive this.
  Submission(std::shared_ptr<EngineCore> engine, std::span<const Request> requests);
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;
  ~Submission() { give_up(); }

  // Submits, in order, what there is room for, and waits up to `patience` (nullopt: without end) for more.
  // Returns whether all are submitted. Requests that are wrong, or whose engine is closed meanwhile, count:
  // their Futures say so.
  bool advance(Future::Timeout patience);

  // What the queue has not taken is not started: it ends as cancelled, if it has a Future already.
  void give_up();

  // Of the requests so far, in their order: of all after advance() returned true.
  std::vector<Future> take_futures() { return std::move(futures_); }

 private:
  void make_next();
  void end_all_unsent();

  const std::shared_ptr<EngineCore> engine_;
  const std::span<const Request> requests_;
  std::size_t next_ = 0;
  std::vector<Future> futures_;
  std::vector<std::shared_ptr<Operation>> made_;  // begun in their files
  std::size_t sent_ = 0;                          // of made_
};

// Ends an operation that found the queue closed.
void end_unsent(Operation& operation);

}  // namespace trunkline::io
