// Errors of calls whose arguments do not match a function's parameters.
#pragma once

#include <nanobind/nanobind.h>

namespace trunkline::python {

// Makes calls of the module's functions and of its classes' methods name the argument that is unknown,
// missing or too much, where nanobind lists signatures. Only calls that fail become slower. To be called when
// everything else is registered.
void explain_call_errors(nanobind::module_& module);

}  // namespace trunkline::python
