#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "faults_object.h"
#include "future_object.h"
#include "gil.h"
#include "interruptible.h"
#include "notifier.h"
#include "os/exit_timeout.h"
#include "os/trace_file.h"
#include "python_log.h"

namespace trunkline::python {

namespace {

// As the interpreter does after a KeyboardInterrupt that nobody caught: who started the process sees a
// signal.
void die_of_interrupt() {
  os::finish_trace_from_environment();
  std::fflush(nullptr);
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGINT, &action, nullptr);
  sigset_t interrupt;
  ::sigemptyset(&interrupt);
  ::sigaddset(&interrupt, SIGINT);
  ::pthread_sigmask(SIG_UNBLOCK, &interrupt, nullptr);
  ::raise(SIGINT);
  constexpr int kShellsStatus = 128 + SIGINT;
  ::_exit(kShellsStatus);
}

// Exit handlers still run, but none of them can change the exit code.
void end_by_interrupt() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (Py_AtExit(&die_of_interrupt) != 0) static_cast<void>(std::atexit(&die_of_interrupt));
  });
}

// The same for operations that were abandoned: what they write may be incomplete, so the process has failed.
void fail() {
  os::finish_trace_from_environment();
  std::fflush(nullptr);
  ::_exit(EXIT_FAILURE);
}

void end_by_failure() {
  if (Py_AtExit(&fail) != 0) static_cast<void>(std::atexit(&fail));
}

// The wait for operations at the exit. After a while it reports what it waits for. It ends when none of them
// has moved a byte for os::exit_timeout().
class ExitWait {
 public:
  // Whether to go on waiting for `pending`. Needs the GIL.
  bool should_continue(const std::vector<Future>& pending) {
    const Clock::time_point now = Clock::now();
    std::uint64_t moved = 0;
    for (const Future& future : pending) moved += future.bytes_done();
    const Clock::duration stalled = timer_.stalled_for({pending.size(), moved}, now);
    if (pending.empty()) return true;
    if (!has_reported_ && stalled >= std::min<Clock::duration>(kReportAfter, timeout_ / 2)) {
      has_reported_ = true;
      report(fmt::format("the exit waits for {}; Ctrl-C ends the wait", names_of(pending)));
    }
    if (stalled < timeout_) return true;
    report(fmt::format("no progress for {} s: gave up {}; check whether the device responds (dmesg)",
                       std::chrono::duration<double>(timeout_).count(), names_of(pending)));
    return false;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kReportAfter{2};

  static std::string names_of(const std::vector<Future>& pending) {
    constexpr std::size_t kNamed = 3;
    std::string names;
    for (std::size_t i = 0; i < std::min(pending.size(), kNamed); ++i)
      names += (i == 0 ? "" : ", ") + pending[i].description();
    if (pending.size() > kNamed) names += fmt::format(" and {} more", pending.size() - kNamed);
    return names;
  }
  static void report(const std::string& text) { PySys_FormatStderr("trunkline: %s\n", text.c_str()); }

  const std::chrono::milliseconds timeout_ = os::exit_timeout();
  os::StallTimer<std::pair<std::size_t, std::uint64_t>> timer_{{0, 0}, Clock::now()};  // pending, bytes moved
  bool has_reported_ = false;
};

std::vector<Future> pending_operations(Notifier& notifier) {
  std::vector<Future> pending = FutureObject::pending();
  for (Future& future : notifier.pending()) pending.push_back(std::move(future));
  return pending;
}

// Returns whether all have ended, and their callbacks have run.
bool await_operations(Notifier& notifier) {
  ExitWait wait;
  while (true) {
    FaultsObject::release_all();
    const std::vector<Future> pending = pending_operations(notifier);
    if (!pending.empty()) {
      wait_interruptibly(pending.front(), kSignalLatency);
    } else {
      if (notifier.drained(kSignalLatency)) return true;
      check_signals();
    }
    if (!wait.should_continue(pending)) return false;
  }
}

// 1. Held commands are released, so that everything can end.
// 2. All operations end, and callbacks have run; unless a device hangs, or Ctrl-C ends the wait. Then the
//    process ends without the steps that would wait for them, and with an exit code that reports it. Memory
//    of operations in flight is never freed: the kernel may write to it.
// 3. Log records are delivered; later ones go to stderr, if anywhere.
// 4. The notifier ends, and other threads that are in a call of the package stay there: no thread may ask for
//    the GIL once the interpreter is finalizing.
// Later exit handlers can still use files and engines, but not callbacks.
void shut_down() {
  Notifier& notifier = Notifier::instance();
  const auto end = [&] {
    stop_log_delivery();
    notifier.stop();
    GilReleased::hold_back_other_threads();
  };
  try {
    if (!await_operations(notifier)) end_by_failure();
  } catch (const nb::python_error&) {
    if (!pending_operations(notifier).empty()) end_by_interrupt();
    end();
    throw;
  }
  end();
}

}  // namespace

void register_shutdown(nb::module_& module) {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&shut_down));
  module.def(
      "exit_timeout", [] { return std::chrono::duration<double>(os::exit_timeout()).count(); },
      "How long the exit waits without progress, in seconds: TRUNKLINE_EXIT_TIMEOUT, else 120.");
  module.def("end_by_interrupt", &end_by_interrupt, nb::sig("def end_by_interrupt() -> None"),
             "Makes the process end as if SIGINT had killed it, once the interpreter has ended.");
}

}  // namespace trunkline::python
