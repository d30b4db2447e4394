#include <nanobind/stl/string.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "arguments.h"
#include "base/trace.h"
#include "bindings.h"
#include "errors.h"
#include "gil.h"
#include "os/trace_file.h"
#include "trunkline/trace.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

// Kinds live as long as the process. Needs the GIL.
const trace::Kind& kind_of(const std::string& name, trace::Category category) {
  struct Named {
    std::string name;
    trace::Kind kind;
  };
  static auto* const kinds = new std::map<std::pair<std::string, trace::Category>, std::unique_ptr<Named>>;
  std::unique_ptr<Named>& known = (*kinds)[{name, category}];
  if (known == nullptr) {
    known = std::make_unique<Named>(Named{.name = name, .kind = {}});
    known->kind = {.name = known->name.c_str(), .category = category};
  }
  return known->kind;
}

trace::Category category_argument(const std::string& name) {
  if (name == "wait") return trace::Category::wait;
  if (name == "checkpoint") return trace::Category::checkpoint;
  if (name == "stream") return trace::Category::stream;
  throw nb::value_error(("category: \"" + name + "\" is not \"wait\", \"checkpoint\" or \"stream\"").c_str());
}

// A slice of the calling thread, from __enter__ to __exit__.
class TraceSpan {
 public:
  TraceSpan(const std::string& category, const std::string& name, const nb::bytes& of)
      : kind_(kind_of(name, category_argument(category))), of_(of.c_str(), of.size()) {}

  void enter() { span_.emplace(kind_, of_); }
  void exit(const nb::args& /*error*/) { span_.reset(); }

 private:
  const trace::Kind& kind_;
  const std::string of_;
  std::optional<trace::Span> span_;
};

nb::dict stop() {
  const TraceSummary summary = unwrap([] {
    const GilReleased unlocked;
    return stop_trace();
  }());
  nb::dict dict;
  dict["path"] = decode_path(summary.path);
  dict["events"] = summary.events;
  dict["dropped_events"] = summary.dropped_events;
  return dict;
}

}  // namespace

void register_trace(nb::module_& module) {
  nb::class_<TraceSpan>(module, "TraceSpan",
                        "A slice in the trace that is recorded, on the track of the calling thread.")
      .def(nb::init<const std::string&, const std::string&, const nb::bytes&>(), "category"_a, "name"_a,
           "of"_a = nb::bytes("", 0),
           nb::sig("def __init__(self, category: str, name: str, of: bytes = b'') -> None"))
      .def("__enter__", &TraceSpan::enter)
      .def("__exit__", &TraceSpan::exit, nb::sig("def __exit__(self, *error: object) -> None"));
  module.def("is_tracing", &trace::is_on, "Whether a trace is being recorded.");
  module.def(
      "start_trace",
      [](nb::handle path) {
        const std::string name = path_argument(path, "path");
        unwrap([&name] {
          const GilReleased unlocked;
          return start_trace(name);
        }());
      },
      "path"_a, nb::sig("def start_trace(path: trunkline._types.Path) -> None"), "Begins to record a trace.");
  module.def("stop_trace", &stop, nb::sig("def stop_trace() -> dict[str, typing.Any]"),
             "Writes the trace; returns \"path\", \"events\" and \"dropped_events\".");
  // The interpreter may end the process by a signal (an interrupt that nobody caught), without exit handlers
  // of the C library.
  Py_AtExit(&os::finish_trace_from_environment);
}

}  // namespace trunkline::python
