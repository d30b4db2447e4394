#include "python_reduction.h"

#include <utility>

namespace trunkline::python {

namespace nb = nanobind;

PythonReduction::PythonReduction(const nb::object& reduction)
    : begin_(reduction.attr("begin")), poll_(reduction.attr("poll")) {}

Result<void> PythonReduction::begin(std::int64_t value) {
  const nb::gil_scoped_acquire locked;
  try {
    begin_(value);
    return {};
  } catch (const std::exception&) {
    return std::unexpected(keep_exception());
  }
}

Result<std::optional<std::int64_t>> PythonReduction::poll() {
  const nb::gil_scoped_acquire locked;
  try {
    const nb::object value = poll_();
    if (value.is_none()) return std::nullopt;
    return nb::cast<std::int64_t>(value);
  } catch (const std::exception&) {
    return std::unexpected(keep_exception());
  }
}

void PythonReduction::raise_pending() {
  if (exception_) std::rethrow_exception(std::exchange(exception_, nullptr));
}

Error PythonReduction::keep_exception() {
  exception_ = std::current_exception();
  return make_error(ErrorKind::cancelled, "the ranks cannot meet");
}

}  // namespace trunkline::python
