#include <Python.h>

#include <cstdint>

#include "bindings.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

// Keeps Python's cyclic garbage collector from running while it is entered.
//
// The collector visits every container again and again while millions of them are made, none of which can be
// garbage yet: almost half of the time of saving and loading many small tensors. In C++ because a signal
// handler that raises (Ctrl-C) cannot come between the end of a `with` block and an __exit__ in C++, so that
// the collector is never left off. Needs the GIL, which guards what is static here.
class GcPause {
 public:
  void enter() {
    if (depth_++ == 0) was_enabled_ = PyGC_Disable() != 0;
    forks_before_ = forks_;
  }
  void exit() {
    if (forks_before_ != forks_) return;  // after_fork() has ended it
    if (--depth_ == 0 && was_enabled_) PyGC_Enable();
  }

  // In a forked child: the pauses of other threads would never end.
  static void after_fork() {
    ++forks_;
    if (depth_ > 0 && was_enabled_) PyGC_Enable();
    depth_ = 0;
  }

 private:
  std::uint64_t forks_before_ = 0;

  static inline std::uint64_t depth_ = 0;  // of all threads
  static inline bool was_enabled_ = false;
  static inline std::uint64_t forks_ = 0;
};

}  // namespace

void register_gc_pause(nb::module_& module) {
  nb::class_<GcPause>(module, "GcPause",
                      "Pauses Python's cyclic garbage collector within a `with` block, if it was enabled. "
                      "Blocks of\nseveral threads may overlap; each needs its own GcPause.")
      .def(nb::init<>())
      .def("__enter__", &GcPause::enter, nb::sig("def __enter__(self) -> None"), "Begins the pause.")
      .def(
          "__exit__", [](GcPause& self, const nb::args& /*exception*/) { self.exit(); },
          nb::sig("def __exit__(self, *exception: object) -> None"), "Ends the pause.");
  nb::module_::import_("os").attr("register_at_fork")("after_in_child"_a =
                                                          nb::cpp_function(&GcPause::after_fork));
}

}  // namespace trunkline::python
