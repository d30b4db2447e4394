#include "interruptible.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <future>
#include <memory>
#include <system_error>
#include <thread>

#include "gil.h"

namespace trunkline::python {

namespace nb = nanobind;
using Clock = std::chrono::steady_clock;

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

Result<std::uint64_t> result_or_cancel(Future future) {
  try {
    wait_interruptibly(future, std::nullopt);
  } catch (const nb::python_error&) {
    const GilReleased unlocked;
    future.cancel();
    future.wait();
    throw;
  }
  return future.result();
}

Status call_interruptibly(std::function<Status()> call) {
  if (!on_main_thread()) {
    const GilReleased unlocked;
    return call();
  }
  const auto task = std::make_shared<std::packaged_task<Status()>>(std::move(call));
  std::future<Status> result = task->get_future();
  {
    const GilReleased unlocked;
    try {
      std::thread([task] { (*task)(); }).detach();
    } catch (const std::system_error&) {
      (*task)();  // no thread to be had: the wait cannot be interrupted, but it ends
    }
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
