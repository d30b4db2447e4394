// The Python class Future: one operation, and the Python memory that it moves.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "buffer_view.h"
#include "trunkline/future.h"

namespace trunkline::python {

// Holds its BufferView until the operation is done. When Python drops the object before that, the notifier
// holds it instead, so that the common case involves no other thread. All members need the GIL.
class FutureObject {
 public:
  explicit FutureObject(std::unique_ptr<BufferView> memory);
  FutureObject(const FutureObject&) = delete;
  FutureObject& operator=(const FutureObject&) = delete;
  ~FutureObject();

  // Raises `closed` when the operation was submitted before a fork, by the parent. `action` is what is
  // wanted.
  void check_own(std::string_view action) const;

  // To be called once, before the object is given to Python.
  void start(Future future) { future_ = std::move(future); }

  const MemoryView& memory() const { return view_; }
  const Future& future() const { return future_; }

  bool done();
  bool wait(Future::Timeout timeout);  // raises `closed` for an operation of a fork's parent
  Result<std::uint64_t> result(Future::Timeout timeout);  // timed_out when the timeout came first
  bool cancel();
  std::uint64_t bytes_done() const { return future_.bytes_done(); }

  // Of the objects alive in this process, the futures whose operations are not done.
  static std::vector<Future> pending();

 private:
  void settle();  // once done: lets go of the memory
  void unlink();

  Future future_;
  MemoryView view_;
  std::unique_ptr<BufferView> memory_;
  unsigned generation_;

  // The list of objects whose operations were not seen done yet.
  FutureObject* previous_ = nullptr;
  FutureObject* next_ = nullptr;
  static FutureObject* first_;
};

// Timed out after `timeout`, as an Error.
Error wait_timed_out(Future::Timeout timeout);

}  // namespace trunkline::python
