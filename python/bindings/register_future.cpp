#include <ranges>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "errors.h"
#include "future_object.h"
#include "interruptible.h"
#include "notifier.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

class Callback : public Notifier::Task {
 public:
  Callback(nb::object function, nb::object future)
      : function_(std::move(function)), future_(std::move(future)) {}
  void run() override {
    PyObject* argument = future_.ptr();
    PyObject* result = PyObject_Vectorcall(function_.ptr(), &argument, 1, nullptr);
    if (result == nullptr) PyErr_WriteUnraisable(function_.ptr());
    Py_XDECREF(result);
  }

 private:
  nb::object function_;
  nb::object future_;
};

void add_done_callback(nb::handle_t<FutureObject> self, nb::handle function) {
  if (PyCallable_Check(function.ptr()) == 0) {
    raise_type_error("fn: must be callable with the Future, not " + shown_type(function));
  }
  FutureObject& object = nb::cast<FutureObject&>(self);
  if (!object.done()) object.check_own("add a callback to an operation");
  std::unique_ptr<Notifier::Task> call = std::make_unique<Callback>(nb::borrow(function), nb::borrow(self));
  unwrap(Notifier::instance().when_done(object.future(), call));
}

nb::object exception(FutureObject& self, nb::handle timeout) {
  const Result<std::uint64_t> result = self.result(timeout_argument(timeout));
  if (result) return nb::none();
  if (!self.done()) raise(result.error());  // the wait failed, not the operation
  return exception_of(result.error());
}

std::uint64_t wait_all_futures(nb::handle futures, nb::handle timeout_value) {
  using Clock = std::chrono::steady_clock;
  const Future::Timeout timeout = timeout_argument(timeout_value);
  std::vector<nb::object> alive;
  if (PyObject* iterator = PyObject_GetIter(futures.ptr()); iterator != nullptr) {
    for (nb::handle item : nb::steal<nb::iterator>(iterator)) alive.push_back(nb::borrow(item));
  } else {
    PyErr_Clear();
    raise_type_error("futures: must be a sequence of Future, not " + shown_type(futures));
  }
  std::vector<Future> operations;
  for (const nb::object& item : alive) {
    if (!nb::isinstance<FutureObject>(item)) {
      raise_type_error("futures: must hold only objects of type Future, not " + shown_type(item));
    }
    operations.push_back(nb::cast<FutureObject&>(item).future());
  }
  const Clock::time_point start = Clock::now();
  // From the end: the last one submitted is likely the last to be done, so that one sleep covers them all.
  for (const nb::object& item : std::views::reverse(alive)) {
    Future::Timeout left = timeout;
    if (timeout) left = std::max(*timeout - (Clock::now() - start), std::chrono::nanoseconds{0});
    if (!nb::cast<FutureObject&>(item).wait(left)) raise(wait_timed_out(timeout));
  }
  return unwrap(wait_all(operations));
}

nb::object await(nb::handle_t<FutureObject> self) {
  return nb::module_::import_("trunkline._asyncio").attr("completion")(self).attr("__await__")();
}

}  // namespace

void register_future(nb::module_& module) {
  nb::class_<FutureObject>(
      module, "Future", nb::is_weak_referenceable(),
      "The pending result of one operation, made by async_pread, async_pwrite and Engine.submit.\n\n"
      "It keeps the buffer alive until the operation is done, also when the Future itself is\n"
      "dropped, which does not cancel it. Thread-safe. In asyncio code, `await future` returns the\n"
      "result; cancelling the task cancels the operation.")
      .def("done", &FutureObject::done,
           "Whether the operation has ended: completed, failed or cancelled. Never blocks.")
      .def(
          "wait", [](FutureObject& self, nb::handle timeout) { return self.wait(timeout_argument(timeout)); },
          "timeout"_a = nb::none(), nb::sig("def wait(self, timeout: float | None = None) -> bool"),
          "Returns True once the operation is done, False after `timeout` seconds (None: no timeout).\n\n"
          "Ctrl-C ends the wait, not the operation.")
      .def(
          "result",
          [](FutureObject& self, nb::handle timeout) {
            return unwrap(self.result(timeout_argument(timeout)));
          },
          "timeout"_a = nb::none(), nb::sig("def result(self, timeout: float | None = None) -> int"),
          "Bytes moved, always all of the buffer.\n\n"
          "Raises the operation's error (a trunkline.Error; Cancelled after a cancel), or Timeout after "
          "`timeout`\n"
          "seconds; then the operation goes on and still uses the buffer.")
      .def("exception", &exception, "timeout"_a = nb::none(),
           nb::sig("def exception(self, timeout: float | None = None) -> Exception | None"),
           "The exception that result() would raise, or None. Raises Timeout after `timeout` seconds.")
      .def("cancel", &FutureObject::cancel,
           "Drops transfers that were not submitted yet and returns whether there were any.\n\n"
           "Submitted transfers are awaited: the operation has ended only once done() returns True. If this\n"
           "returns True, it ends with Cancelled and the bytes of its range are unspecified; if False, as if "
           "it\n"
           "had not been cancelled.")
      .def("add_done_callback", &add_done_callback, "fn"_a.none(),
           nb::sig("def add_done_callback(self, fn: collections.abc.Callable[[Future], object]) -> None"),
           "Calls fn(future) once the operation is done, on the thread that runs all callbacks of the "
           "process.\n\n"
           "So fn should be short, and must not wait for other operations' callbacks. Its exceptions go to\n"
           "sys.unraisablehook.")
      .def_prop_ro("bytes_done", &FutureObject::bytes_done,
                   "Bytes that have arrived so far (int); the result once done.")
      .def("__await__", &await,
           nb::sig("def __await__(self) -> collections.abc.Generator[typing.Any, None, int]"));

  module.def(
      "wait_all", &wait_all_futures, "futures"_a.none(), "timeout"_a = nb::none(),
      nb::sig("def wait_all(futures: collections.abc.Iterable[Future], timeout: float | None = None) -> int"),
      "Waits for all of `futures` and returns the sum of bytes moved.\n\n"
      "Raises the first error in their order once all are done, or Timeout when `timeout` (seconds) came "
      "first.");
}

}  // namespace trunkline::python
