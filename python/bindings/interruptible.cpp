#include "interruptible.h"

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <thread>

#include "future_object.h"
#include "io/engine_core.h"
#include "io/file/file_core.h"
#include "io/submission.h"
#include "os/signals_blocked.h"

namespace trunkline::python {

namespace nb = nanobind;
using Clock = std::chrono::steady_clock;

namespace {

// How long to wait for a cancelled operation: a device that works has completed its transfers by then, and
// the caller may use the memory again.
constexpr std::chrono::milliseconds kCancelTimeout{500};

// Before `requests` are submitted, room is made for those that write beyond the end of their file: that takes
// system calls, which the submission then finds done. What fails now fails there again, and is reported
// there.
void make_room_interruptibly(const Engine& engine, std::span<const Request> requests) {
  for (const Request& request : requests) {
    if (request.op != Op::write || request.file == nullptr || !request.file->valid()) continue;
    const std::uint64_t bytes = request.memory.bytes;
    const std::shared_ptr<FileCore>& file = request.file->core();
    if (!file->extends(request.offset, bytes, engine.config().slot_bytes)) continue;
    static_cast<void>(call_interruptibly([core = engine.core(), file, offset = request.offset, bytes] {
      return core->make_room(file, offset, bytes);
    }));
  }
}

void advance_interruptibly(io::Submission& submission) {
  while (true) {
    {
      const GilReleased unlocked;
      if (submission.advance(on_main_thread() ? Future::Timeout(kSignalLatency) : std::nullopt)) return;
    }
    check_signals();
  }
}

void start(std::span<const std::unique_ptr<FutureObject>> objects, std::vector<Future> futures) {
  for (std::size_t i = 0; i < futures.size(); ++i) objects[i]->start(std::move(futures[i]));
}

}  // namespace

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

bool wait_interruptibly(const Future& future, Future::Timeout timeout) {
  if (future.done()) return true;
  if (!on_main_thread()) {
    const GilReleased unlocked;
    return future.wait(timeout);
  }
  const Clock::time_point start = Clock::now();
  while (true) {
    std::chrono::nanoseconds slice = kSignalLatency;
    if (timeout) slice = std::clamp(*timeout - (Clock::now() - start), std::chrono::nanoseconds{0}, slice);
    bool done = false;
    {
      const GilReleased unlocked;
      done = future.wait(slice);
    }
    if (done) return true;
    check_signals();
    if (timeout && Clock::now() - start >= *timeout) return false;
  }
}

void submit_interruptibly(const Engine& engine, std::span<const Request> requests,
                          std::span<const std::unique_ptr<FutureObject>> objects) {
  if (on_main_thread()) make_room_interruptibly(engine, requests);
  io::Submission submission(engine.core(), requests);
  try {
    advance_interruptibly(submission);
  } catch (const nb::python_error&) {
    submission.give_up();
    start(objects, submission.take_futures());  // whose objects keep the memory of what goes on
    throw;
  }
  start(objects, submission.take_futures());
}

Result<std::uint64_t> result_or_cancel(std::unique_ptr<FutureObject> object) {
  try {
    return object->result(std::nullopt);
  } catch (const nb::python_error&) {
    const GilReleased unlocked;
    Future future = object->future();
    future.cancel();
    future.wait(kCancelTimeout);
    throw;
  }
}

void run_beside(std::function<void()> task) {
  const auto shared = std::make_shared<std::function<void()>>(std::move(task));
  try {
    const os::SignalsBlocked blocked;  // signals are for the threads that wait
    std::thread([shared] {
      pthread_setname_np(pthread_self(), "trunkline-call");
      (*shared)();
    }).detach();
  } catch (const std::system_error&) {
    (*shared)();  // the wait cannot be interrupted
  }
}

}  // namespace trunkline::python
