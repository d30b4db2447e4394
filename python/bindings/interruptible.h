// Waits that release the GIL and end at Ctrl-C.
//
// Python runs signal handlers in the main thread, and only between steps of Python code: while the main
// thread is in a system call, or waits here, Ctrl-C has no effect: forever, if a device hangs. So the main
// thread waits in slices, and another thread makes the system calls that can block.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gil.h"
#include "trunkline/engine.h"
#include "trunkline/future.h"

namespace trunkline::io {
class Submission;
}

namespace trunkline::python {

class FutureObject;

// How long a wait may delay a signal's Python handler.
inline constexpr std::chrono::milliseconds kSignalLatency{50};

// Runs signal handlers that are due; throws what they raise (KeyboardInterrupt). Needs the GIL; only does
// something on the main thread, where Python runs its handlers.
void check_signals();

// Future::wait() without the GIL; on the main thread in slices, between which signal handlers run. Needs the
// GIL.
bool wait_interruptibly(const Future& future, Future::Timeout timeout);

// Submits `requests` without the GIL, and gives each of `objects`, in the same order, the Future of its
// request. When a signal handler ends the wait for room in the queue, requests that the queue has accepted go
// on, and the rest is not started. Needs the GIL.
void submit_interruptibly(const Engine& engine, std::span<const Request> requests,
                          std::span<const std::unique_ptr<FutureObject>> objects);

// The result of an operation that nobody else knows of. When a signal handler ends the wait, the operation is
// cancelled; if it is not over soon after that, its memory is kept until it is.
Result<std::uint64_t> result_or_cancel(std::unique_ptr<FutureObject> object);

// Runs a call without the GIL that does not block for long, or need not be interrupted.
template <class Call>
auto call_unlocked(const Call& call) -> decltype(call()) {
  const GilReleased unlocked;
  return call();
}

// Runs `task` in a separate thread; in this one if none can be started.
void run_beside(std::function<void()> task);

// Runs a call that may block for long and cannot be cut into slices, without the GIL. For the main thread it
// runs in another one, so that a signal handler can end the wait for it. The call itself goes on to its end:
// it must own all that it uses, and neither that nor its result may be Python objects. Needs the GIL.
template <class Call>
auto call_interruptibly(Call call) -> decltype(call()) {
  using Outcome = decltype(call());
  if (!on_main_thread()) {
    const GilReleased unlocked;
    return call();
  }
  const auto task = std::make_shared<std::packaged_task<Outcome()>>(std::move(call));
  std::future<Outcome> result = task->get_future();
  {
    const GilReleased unlocked;
    run_beside([task] { (*task)(); });
  }
  while (true) {
    {
      const GilReleased unlocked;
      if (result.wait_for(kSignalLatency) == std::future_status::ready) return result.get();
    }
    check_signals();
  }
}

}  // namespace trunkline::python
