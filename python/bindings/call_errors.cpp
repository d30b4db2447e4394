#include "call_errors.h"

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace trunkline::python {

namespace nb = nanobind;

namespace {

// Nanobind raises such errors itself, in one of a few functions that all calls go through by a pointer in the
// object that is called (PEP 590). Each of these functions is replaced by one that looks at a failed call.
constexpr std::size_t kMostEntries = 8;
std::array<vectorcallfunc, kMostEntries> entries{};  // of nanobind, as they are met

void explain(PyObject* function, std::uint32_t positional, PyObject* names) {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) return;
  nb::python_error error;
  try {
    const nb::object message = nb::module_::import_("trunkline._call_errors")
                                   .attr("explain")(nb::handle(function), nb::str(error.value()), positional,
                                                    names == nullptr ? nb::tuple() : nb::borrow(names));
    if (!message.is_none()) {
      PyErr_SetObject(PyExc_TypeError, message.ptr());
      return;
    }
  } catch (nb::python_error& failed) {
    failed.discard_as_unraisable("explaining the error of a call");
  }
  error.restore();
}

template <std::size_t kEntry>
PyObject* call(PyObject* function, PyObject* const* arguments, std::size_t flags, PyObject* names) {
  PyObject* result = entries[kEntry](function, arguments, flags, names);
  if (result == nullptr) [[unlikely]]
    explain(function, static_cast<std::uint32_t>(flags), names);  // above are flags, one of nanobind itself
  return result;
}

template <std::size_t... kEntry>
constexpr std::array<vectorcallfunc, sizeof...(kEntry)> calls(std::index_sequence<kEntry...>) {
  return {&call<kEntry>...};
}

// Where nanobind keeps that pointer: right after the object's header, which the stable ABI does not report.
// Its types also describe the pointer as a member, an integer for Python; where that has another value,
// nanobind keeps it elsewhere, and this returns nullptr.
vectorcallfunc* entry_of(nb::handle function) {
  std::intptr_t member = 0;
  if (!nb::try_cast(nb::getattr(function, "__vectorcalloffset__", nb::none()), member)) return nullptr;
  auto* const entry = reinterpret_cast<vectorcallfunc*>(reinterpret_cast<PyVarObject*>(function.ptr()) + 1);
  return reinterpret_cast<std::intptr_t>(*entry) == member ? entry : nullptr;
}

void replace_entry(vectorcallfunc& entry) {
  static constexpr auto kCalls = calls(std::make_index_sequence<kMostEntries>());
  for (std::size_t i = 0; i < kMostEntries; ++i) {
    if (entry == kCalls[i]) return;  // met before, by another name
    if (entries[i] == nullptr) entries[i] = entry;
    if (entries[i] != entry) continue;
    entry = kCalls[i];
    return;
  }
}

void replace_entries(nb::handle scope) {
  for (const nb::handle value : nb::borrow<nb::object>(scope.attr("__dict__")).attr("values")()) {
    vectorcallfunc* const entry = nb::hasattr(value, "__nb_signature__") ? entry_of(value) : nullptr;
    if (entry != nullptr)
      replace_entry(*entry);
    else if (nb::isinstance<nb::type_object>(value) && value.attr("__module__").equal(scope.attr("__name__")))
      replace_entries(value);
  }
}

}  // namespace

void explain_call_errors(nb::module_& module) { replace_entries(module); }

}  // namespace trunkline::python
