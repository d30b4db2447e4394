// From the library's Result to Python's exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>
#include <utility>

#include "trunkline/error.h"

namespace trunkline::python {

// The Python exception of `error`; which class it is, trunkline/_errors.py says. Needs the GIL, as all here.
nanobind::object exception_of(const Error& error);
[[noreturn]] void raise(const Error& error);

// TypeError and ValueError. `message` starts with the name of the argument.
[[noreturn]] void raise_type_error(std::string_view message);
[[noreturn]] void raise_value_error(std::string_view message);

// str of bytes that may hold a path: bytes that are not UTF-8 become surrogates, as os.fsdecode does.
nanobind::object decode_path(std::string_view bytes);

template <class T>
T unwrap(Result<T> result) {
  if (!result) raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace trunkline::python
