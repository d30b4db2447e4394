// Where, and how often, the extension module can be initialized.
#pragma once

#include <Python.h>

namespace trunkline::python {

// The definition of the extension module, made from nanobind's: it can be imported in the main interpreter
// alone (elsewhere an ImportError says so), and importing it again there gives the names of the first import.
// `definition` is what nanobind's PyInit function makes. Returns null with an exception set.
PyObject* main_interpreter_only(PyObject* (*definition)());

}  // namespace trunkline::python
