#include "errors.h"

namespace trunkline::python {

namespace nb = nanobind;

nb::object decode_path(std::string_view bytes) {
  PyObject* text = PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  if (text == nullptr) throw nb::python_error();
  return nb::steal(text);
}

nb::object exception_of(const Error& error) {
  const std::string_view kind = to_string(error.kind);
  return nb::module_::import_("trunkline._errors")
      .attr("exception_of")(nb::str(kind.data(), kind.size()), error.code, decode_path(error.message),
                            decode_path(error.path));
}

void raise(const Error& error) {
  const nb::object exception = exception_of(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

void raise_type_error(std::string_view message) {
  PyErr_SetObject(PyExc_TypeError, decode_path(message).ptr());
  throw nb::python_error();
}

void raise_value_error(std::string_view message) {
  PyErr_SetObject(PyExc_ValueError, decode_path(message).ptr());
  throw nb::python_error();
}

}  // namespace trunkline::python
