#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "bindings.h"
#include "faults_object.h"
#include "future_object.h"
#include "gil.h"
#include "interruptible.h"
#include "notifier.h"

namespace trunkline::python {

namespace {

// 1. Held commands are released, so that everything can end.
// 2. All operations end, and callbacks have run.
// 3. The notifier ends, and other threads that are in a call of the package stay there: no thread may ask for
//    the GIL once the interpreter is finalizing.
// Files and engines stay usable for exit handlers that come later, but for callbacks.
void shut_down() {
  Notifier& notifier = Notifier::instance();
  try {
    FaultsObject::release_all();
    for (const Future& future : FutureObject::pending()) {
      while (!wait_interruptibly(future, kSignalLatency)) FaultsObject::release_all();
    }
    while (!notifier.drained(kSignalLatency)) {
      check_signals();
      FaultsObject::release_all();
    }
  } catch (const nb::python_error&) {
    notifier.stop();
    GilReleased::hold_back_other_threads();
    throw;
  }
  notifier.stop();
  GilReleased::hold_back_other_threads();
}

// As the interpreter does after a KeyboardInterrupt that nobody caught: who started the process sees a
// signal.
void die_of_interrupt() {
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

// Exit handlers still run, which an end at once would skip; but none of them can change the exit code.
void end_by_interrupt() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (Py_AtExit(&die_of_interrupt) != 0) static_cast<void>(std::atexit(&die_of_interrupt));
  });
}

}  // namespace

void register_shutdown(nb::module_& module) {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&shut_down));
  module.def("end_by_interrupt", &end_by_interrupt, nb::sig("def end_by_interrupt() -> None"),
             "Makes the process end as if SIGINT had killed it, once the interpreter has ended.");
}

}  // namespace trunkline::python
