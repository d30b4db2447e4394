#include "main_interpreter.h"

#include <array>

namespace trunkline::python {
namespace {

using Execute = int (*)(PyObject* module);

// Nanobind's own initialization, and the names that it defined. Both are kept until the process ends, like
// the types. Guarded by the GIL of the main interpreter.
Execute initialize = nullptr;
PyObject* names = nullptr;

constexpr const char* kNotHere =
    "trunkline cannot be imported in a sub-interpreter: its threads, engines and types belong to one "
    "interpreter; import it in the main interpreter, or use processes (multiprocessing with \"spawn\")";

// By its number: the stable ABI does not report which interpreter is the main one.
bool is_main_interpreter() { return PyInterpreterState_GetID(PyInterpreterState_Get()) == 0; }

// Nanobind keeps its types in global variables. Initialized in a second interpreter, they would point to its
// objects, and the first interpreter would use them after they are gone.
int execute(PyObject* module) {
  if (!is_main_interpreter()) {
    PyErr_SetString(PyExc_ImportError, kNotHere);
    return -1;
  }
  PyObject* dict = PyModule_GetDict(module);  // borrowed
  // The types are registered once: importing again after a removal from sys.modules gives the same types.
  if (names != nullptr) return PyDict_Merge(dict, names, 0);
  if (initialize(module) != 0) return -1;
  names = PyDict_Copy(dict);
  return names == nullptr ? -1 : 0;
}

// A copy of `given` that runs execute() in place of its initialization. With a check of its own it may
// promise every interpreter to load; the message of Python's check would not say what to do.
PyModuleDef* guarded(const PyModuleDef& given) {
  static PyModuleDef definition;
  static std::array<PyModuleDef_Slot, 8> slots{};
  definition = given;
  definition.m_base = PyModuleDef_HEAD_INIT;
  definition.m_name = "_core";
  definition.m_slots = slots.data();
  std::size_t count = 0;
  for (const PyModuleDef_Slot* slot = given.m_slots; slot->slot != 0; ++slot) {
    if (count + 1 == slots.size()) return nullptr;
    PyModuleDef_Slot& copy = slots.at(count++);
    copy = *slot;
    if (slot->slot == Py_mod_exec) {
      initialize = reinterpret_cast<Execute>(slot->value);
      copy.value = reinterpret_cast<void*>(&execute);
    }
#ifdef Py_mod_multiple_interpreters
    if (slot->slot == Py_mod_multiple_interpreters) copy.value = Py_MOD_PER_INTERPRETER_GIL_SUPPORTED;
#endif
  }
  return initialize == nullptr ? nullptr : &definition;
}

}  // namespace

PyObject* main_interpreter_only(PyObject* (*definition)()) {
  // From Python 3.13 on this runs in the main interpreter, whichever imports: execute() asks again.
  if (!is_main_interpreter()) {
    PyErr_SetString(PyExc_ImportError, kNotHere);
    return nullptr;
  }
  static PyModuleDef* made = nullptr;
  if (made == nullptr) {
    PyObject* given = definition();  // borrowed
    if (given == nullptr) return nullptr;
    made = guarded(*reinterpret_cast<PyModuleDef*>(given));
    if (made == nullptr) {
      PyErr_SetString(PyExc_ImportError, "trunkline._core: nanobind's module definition is not understood");
      return nullptr;
    }
  }
  return PyModuleDef_Init(made);
}

}  // namespace trunkline::python
