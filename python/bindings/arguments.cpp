#include "arguments.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <string_view>

#include "errors.h"
#include "trunkline/units.h"

namespace trunkline::python {

namespace nb = nanobind;

namespace {

std::string_view text_of(nb::handle value) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &length);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<std::size_t>(length)};
}

// An error of parsing an argument is the caller's, whatever it names: it becomes a ValueError.
template <class T>
T parsed(Result<T> result, const char* name) {
  if (!result) {
    const std::string& message = result.error().message;
    const std::string prefix = fmt::format("{}: ", name);
    raise_value_error(message.starts_with(prefix) ? message : prefix + message);
  }
  return std::move(*result);
}

}  // namespace

std::string shown_type(nb::handle value) {
  const nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())));
  const nb::object module = nb::getattr(type, "__module__", nb::str("builtins"));
  const nb::str name(nb::getattr(type, "__qualname__"));
  if (!nb::isinstance<nb::str>(module) || module.equal(nb::str("builtins"))) return name.c_str();
  return fmt::format("{}.{}", nb::str(module).c_str(), name.c_str());
}

std::string path_argument(nb::handle value, const char* name) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(value.ptr(), &encoded) == 0) {
    const nb::python_error cause;
    if (cause.matches(PyExc_ValueError)) {
      raise_value_error(fmt::format("{}: {}", name, nb::str(cause.value()).c_str()));
    }
    if (!cause.matches(PyExc_TypeError)) throw cause;
    raise_type_error(fmt::format("{}: must be str, bytes or os.PathLike, not {}", name, shown_type(value)));
  }
  const nb::object owner = nb::steal(encoded);
  return {PyBytes_AsString(encoded), static_cast<std::size_t>(PyBytes_Size(encoded))};
}

std::vector<std::string> paths_argument(nb::handle value, const char* name) {
  // A single path is not a list of its characters.
  const bool one_path = PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr()) ||
                        PyByteArray_Check(value.ptr()) || nb::hasattr(value, "__fspath__");
  if (one_path || !PySequence_Check(value.ptr())) {
    raise_type_error(fmt::format("{}: must be a list of paths, not {}{}", name, shown_type(value),
                                 one_path ? "; put it into a list" : ""));
  }
  std::vector<std::string> paths;
  for (const nb::handle path : nb::borrow<nb::sequence>(value)) paths.push_back(path_argument(path, name));
  return paths;
}

std::uint64_t count_argument(nb::handle value, const char* name) {
  nb::object whole = nb::borrow(value);
  if (!PyLong_CheckExact(value.ptr())) {
    if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
      raise_type_error(fmt::format("{}: must be an int, not {}", name, shown_type(value)));
    }
    whole = nb::steal(PyNumber_Index(value.ptr()));
    if (!whole.is_valid()) {  // __index__ raised, as that of a tensor of floats does
      const nb::python_error cause;
      if (!cause.matches(PyExc_TypeError)) throw cause;
      raise_type_error(fmt::format("{}: must be an int, not {}", name, shown_type(value)));
    }
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
  if (overflow > 0) raise_value_error(fmt::format("{}: is beyond 2^63 - 1", name));
  if (overflow < 0 || number < 0) raise_value_error(fmt::format("{}: must be at least 0", name));
  return static_cast<std::uint64_t>(number);
}

std::uint64_t size_argument(nb::handle value, const char* name) {
  if (PyUnicode_Check(value.ptr())) return parsed(parse_bytes(text_of(value)), name);
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
    raise_type_error(fmt::format(
        "{}: must be a number of bytes (int) or a size such as \"20GB\" or \"64MiB\" (str), not {}", name,
        shown_type(value)));
  }
  return count_argument(value, name);
}

std::optional<unsigned> optional_count_argument(nb::handle value, const char* name, unsigned least,
                                                unsigned most) {
  if (value.is_none()) return std::nullopt;
  if (PyLong_CheckExact(value.ptr())) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow != 0 || number < least || number > most) {
      raise_value_error(
          fmt::format("{}: must be from {} to {}, not {}", name, least, most, nb::str(value).c_str()));
    }
  }
  const std::uint64_t count = count_argument(value, name);  // of another integer, such as numpy's
  if (count < least || count > most)
    raise_value_error(fmt::format("{}: must be from {} to {}, not {}", name, least, most, count));
  return static_cast<unsigned>(count);
}

std::optional<std::uint64_t> optional_size_argument(nb::handle value, const char* name) {
  if (value.is_none()) return std::nullopt;
  return size_argument(value, name);
}

Future::Timeout timeout_argument(nb::handle value) {
  if (value.is_none()) return std::nullopt;
  const double seconds = PyFloat_AsDouble(value.ptr());
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_type_error(
        fmt::format("timeout: must be seconds (int or float) or None, not {}", shown_type(value)));
  }
  if (std::isnan(seconds) || seconds < 0)
    raise_value_error("timeout: must be at least 0 seconds, or None for no timeout");
  constexpr double kEndless = 1e9;  // 30 years; beyond it a deadline in nanoseconds could overflow
  if (seconds > kEndless) return std::nullopt;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

BackendKind backend_argument(nb::handle value) {
  if (!PyUnicode_Check(value.ptr()))
    raise_type_error(fmt::format("backend: must be a str, not {}", shown_type(value)));
  return parsed(parse_backend(text_of(value)), "backend");
}

GpuPath gpu_path_argument(nb::handle value) {
  if (!PyUnicode_Check(value.ptr()))
    raise_type_error(fmt::format("gpu: must be a str, not {}", shown_type(value)));
  return parsed(parse_gpu_path(text_of(value)), "gpu");
}

OpenOptions open_options_argument(nb::handle mode, nb::handle direct) {
  OpenOptions options;
  if (!PyUnicode_Check(mode.ptr()))
    raise_type_error(fmt::format("mode: must be a str, not {}", shown_type(mode)));
  options.mode = parsed(parse_mode(text_of(mode)), "mode");
  if (direct.ptr() == Py_True) {
    options.direct = Direct::always;
  } else if (direct.ptr() == Py_False) {
    options.direct = Direct::never;
  } else if (PyUnicode_Check(direct.ptr())) {
    const std::string_view text = text_of(direct);
    if (text == "always") {
      options.direct = Direct::always;
    } else if (text == "never") {
      options.direct = Direct::never;
    } else if (text == "unless_cached") {
      options.direct = Direct::unless_cached;
    } else if (text != "auto") {
      raise_value_error(fmt::format(
          "direct: must be \"auto\", \"always\" (True), \"never\" (False) or \"unless_cached\", not \"{}\"",
          text));
    }
  } else {
    raise_type_error(
        fmt::format("direct: must be \"auto\", \"always\", \"never\", \"unless_cached\" or a bool, not {}",
                    shown_type(direct)));
  }
  return options;
}

}  // namespace trunkline::python
