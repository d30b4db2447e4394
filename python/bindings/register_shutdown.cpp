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

}  // namespace

void register_shutdown() { nb::module_::import_("atexit").attr("register")(nb::cpp_function(&shut_down)); }

}  // namespace trunkline::python
