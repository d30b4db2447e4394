#include "cuda_objects.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "errors.h"
#include "trunkline/device.h"

namespace trunkline::python {

namespace nb = nanobind;

namespace {

// "<f4": as in numpy's interface.
std::uint64_t item_bytes(const std::string& typestr, const char* name) {
  std::uint64_t bytes = 0;
  // "<M8[ns]": a unit may follow.
  const std::string_view type = std::string_view(typestr).substr(0, typestr.find('['));
  for (const char digit : type.substr(std::min<std::size_t>(2, type.size()))) {
    if (digit < '0' || digit > '9' || bytes > 1'000'000) bytes = UINT64_MAX;
    if (bytes == UINT64_MAX) break;
    bytes = bytes * 10 + static_cast<std::uint64_t>(digit - '0');
  }
  if (bytes == 0 || bytes == UINT64_MAX || typestr[1] == 'O')
    raise_value_error(
        fmt::format("{}: its typestr {:?} is not supported: its bytes cannot be transferred", name, typestr));
  return typestr[1] == 'U' ? 4 * bytes : bytes;  // those count characters
}

template <class T>
T unwrap_of(Result<T> result, const char* name) {
  if (!result) result.error().message = fmt::format("{}: {}", name, result.error().message);
  return unwrap(std::move(result));
}

}  // namespace

Device* cuda_device_number(unsigned ordinal, const char* name) {
  return unwrap_of(cuda_device(ordinal), name);
}

void* torch_stream(nb::handle tensor) {
  const nb::object cuda = nb::module_::import_("torch.cuda");
  const nb::object stream = cuda.attr("current_stream")(tensor.attr("device"));
  return stream_argument(stream, "stream");
}

void* stream_argument(nb::handle value, const char* name) {
  nb::object number = nb::borrow(value);
  if (nb::hasattr(value, "__cuda_stream__")) {
    number = nb::object(value.attr("__cuda_stream__")())[1];  // (version, address)
  } else {
    for (const char* attribute : {"cuda_stream", "ptr", "handle"}) {  // of torch, CuPy, Numba
      if (!nb::hasattr(value, attribute)) continue;
      number = value.attr(attribute);
      if (nb::hasattr(number, "value")) number = number.attr("value");  // of ctypes
      break;
    }
  }
  if (number.is_none()) return nullptr;  // Numba's default stream
  if (!PyLong_Check(number.ptr()) || PyBool_Check(number.ptr())) {
    raise_type_error(
        fmt::format("{}: must be a CUDA stream (an int, or an object of torch, CuPy or Numba), not {}", name,
                    shown_type(value)));
  }
  return reinterpret_cast<void*>(count_argument(number, name));
}

CudaArray cuda_array(nb::handle interface, const char* name) {
  CudaArray array;
  const nb::object get = interface.attr("get");
  if (!nb::object(get("mask")).is_none())
    raise_value_error(
        fmt::format("{}: has a mask, which is not supported; pass its data without the mask", name));
  const nb::object data = interface["data"];
  const std::uint64_t address = count_argument(data[0], name);
  array.read_only = nb::cast<bool>(data[1]);
  std::uint64_t bytes = item_bytes(nb::cast<std::string>(interface["typestr"]), name);
  const std::uint64_t item = bytes;
  std::vector<std::uint64_t> shape;
  for (const nb::handle extent : interface["shape"]) {
    shape.push_back(count_argument(extent, name));
    if (__builtin_mul_overflow(bytes, shape.back(), &bytes))
      raise_value_error(fmt::format("{}: its shape holds more than 2^64 bytes", name));
  }
  array.contiguous = true;
  if (const nb::object strides = get("strides"); !strides.is_none() && bytes != 0) {
    std::uint64_t expected = item;
    for (std::size_t axis = shape.size(); axis-- > 0; expected *= shape[axis]) {
      const nb::object stride = strides[axis];
      if (shape[axis] != 1 && !stride.equal(nb::int_(expected))) array.contiguous = false;
    }
  }
  array.memory = {reinterpret_cast<std::byte*>(address), bytes};
  if (bytes == 0) return array;
  array.memory.device =
      cuda_device_number(unwrap_of(cuda_device_of(reinterpret_cast<const void*>(address)), name), name);
  if (const nb::object stream = get("stream"); !stream.is_none())
    array.memory.stream = stream_argument(stream, name);
  return array;
}

}  // namespace trunkline::python
