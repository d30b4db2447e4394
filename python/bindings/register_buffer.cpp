#include <nanobind/ndarray.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "trunkline/device.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

struct BufferObject {
  explicit BufferObject(Buffer buffer_in) : buffer(std::move(buffer_in)) {}
  BufferObject(const BufferObject&) = delete;
  BufferObject& operator=(const BufferObject&) = delete;
  ~BufferObject() {
    const GilReleased unlocked;  // the kernel takes its time to unmap gigabytes
    registration.reset();
    buffer = Buffer();
  }

  Buffer buffer;
  std::shared_ptr<const void> registration;  // with the CUDA driver, or null; goes first
};

// "cuda:1" is 1, "cuda" is 0. Raises Unsupported for anything but a CUDA device.
unsigned cuda_ordinal(const std::string& device) {
  unsigned ordinal = 0;
  const std::string_view number = std::string_view(device).substr(std::min<std::size_t>(5, device.size()));
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), ordinal);
  const bool numbered =
      device.starts_with("cuda:") && error == std::errc{} && end == number.data() + number.size();
  if (device != "cuda" && !numbered) {
    raise(make_error(ErrorKind::unsupported, "device: pinned memory is not supported for " + device +
                                                 "; pass \"cpu\", \"cuda\" or \"cuda:0\", or omit it"));
  }
  return ordinal;
}

int export_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Buffer& buffer = nb::inst_ptr<BufferObject>(self)->buffer;
  return PyBuffer_FillInfo(view, self, buffer.data(), static_cast<Py_ssize_t>(buffer.size()), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_buffer)}, {0, nullptr}};

// With the requested GPU; or with the one in use, where a failure only costs speed.
void register_with_cuda(BufferObject& object, std::optional<unsigned> ordinal) {
  Result<std::shared_ptr<const void>> registered = [&]() -> Result<std::shared_ptr<const void>> {
    const GilReleased unlocked;
    if (!ordinal && !cuda_device_in_use()) return nullptr;
    return register_host_memory(object.buffer.span(), ordinal);
  }();
  if (registered) {
    object.registration = *std::move(registered);
  } else if (ordinal) {
    Error error = registered.error();
    error.message = "device: " + error.message;
    raise(error);
  }
}

BufferObject* pinned_empty(nb::handle bytes_value, nb::handle device, nb::handle engine_value) {
  const std::uint64_t bytes = size_argument(bytes_value, "nbytes");
  std::optional<Engine> engine = engine_argument(engine_value);
  const bool on_host = !device.is_none() && nb::str(device).equal(nb::str("cpu"));
  std::optional<unsigned> ordinal;
  if (!device.is_none() && !on_host) ordinal = cuda_ordinal(nb::str(device).c_str());
  Result<Buffer> buffer = [&]() -> Result<Buffer> {
    const GilReleased unlocked;
    if (!engine) {
      Result<Engine> process_engine = Engine::default_engine();
      if (!process_engine) return std::unexpected(process_engine.error());
      engine = *std::move(process_engine);
    }
    return engine->allocate(bytes);
  }();
  auto object = std::make_unique<BufferObject>(unwrap(std::move(buffer)));
  if (!on_host) register_with_cuda(*object, ordinal);
  return object.release();
}

BufferObject* aligned_empty(nb::handle bytes_value) {
  return new BufferObject(unwrap(Buffer::allocate_pageable(count_argument(bytes_value, "nbytes"))));
}

// The same memory as an object that nanobind makes, which speaks DLPack.
nb::object dlpack_array(nb::handle_t<BufferObject> self) {
  const Buffer& buffer = nb::cast<BufferObject&>(self).buffer;
  return nb::cast(nb::ndarray<nb::array_api, std::uint8_t, nb::ndim<1>, nb::device::cpu>(
      buffer.data(), {buffer.size()}, self));
}

}  // namespace

void register_buffer(nb::module_& module) {
  nb::class_<BufferObject>(
      module, "Buffer", nb::type_slots(buffer_slots), nb::is_weak_referenceable(),
      "Page-aligned memory of an engine's pinned budget, made by pinned_empty; zeroed, writable.\n\n"
      "It has the buffer protocol (memoryview(buffer), numpy.frombuffer, torch.frombuffer) and DLPack;\n"
      "its bytes return to the budget when its last view is deleted.")
      .def_prop_ro(
          "nbytes", [](const BufferObject& self) { return self.buffer.size(); }, "Size in bytes (int).")
      .def_prop_ro(
          "locked", [](const BufferObject& self) { return self.buffer.locked(); },
          "Whether the kernel has locked it against swapping, which RLIMIT_MEMLOCK may forbid (bool).")
      .def_prop_ro(
          "registered", [](const BufferObject& self) { return self.registration != nullptr; },
          "Whether it is registered with the CUDA driver, which makes copies to and from GPUs asynchronous "
          "(bool).")
      .def("__len__", [](const BufferObject& self) { return self.buffer.size(); })
      .def(
          "__dlpack__",
          [](nb::handle_t<BufferObject> self, const nb::kwargs& options) {
            return dlpack_array(self).attr("__dlpack__")(**options);
          },
          nb::sig("def __dlpack__(self, **options: typing.Any) -> object"))
      .def(
          "__dlpack_device__",
          [](nb::handle_t<BufferObject> self) { return dlpack_array(self).attr("__dlpack_device__")(); },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def("__repr__", [](const BufferObject& self) {
        return nb::str("<trunkline.Buffer nbytes={} locked={}>")
            .format(self.buffer.size(), self.buffer.locked());
      });

  module.def(
      "pinned_empty", &pinned_empty, "nbytes"_a.none(), "device"_a = nb::none(), nb::kw_only(),
      "engine"_a = nb::none(),
      nb::sig("def pinned_empty(nbytes: int | str, device: str | None = None, *, engine: Engine | "
              "None = None) -> Buffer"),
      "Page-aligned memory, locked against swapping if RLIMIT_MEMLOCK allows; transfers need no copy.\n\n"
      "`nbytes` is an int or a str such as \"400MB\". Raises OutOfBudget if it does not fit into the\n"
      "pinned_budget_bytes of the engine (None: the default engine), given what is in use.\n\n"
      "If the process already uses a GPU, the memory is also registered with the CUDA driver. `device`\n"
      "\"cuda\" or \"cuda:1\" requires that, and begins to use the GPU (Unsupported without one,\n"
      "DeviceError if the driver fails); \"cpu\" skips it.");
  module.def("aligned_empty", &aligned_empty, "nbytes"_a.none(),
             nb::sig("def aligned_empty(nbytes: int) -> Buffer"),
             "Page-aligned zeros, not locked and not counted in any budget: for loaded data.");
}

}  // namespace trunkline::python
