#include <nanobind/ndarray.h>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

struct BufferObject {
  explicit BufferObject(Buffer buffer_in) : buffer(std::move(buffer_in)) {}
  BufferObject(const BufferObject&) = delete;
  BufferObject& operator=(const BufferObject&) = delete;
  ~BufferObject() {
    const GilReleased unlocked;  // the kernel takes its time to unmap gigabytes
    buffer = Buffer();
  }

  Buffer buffer;
};

int export_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Buffer& buffer = nb::inst_ptr<BufferObject>(self)->buffer;
  return PyBuffer_FillInfo(view, self, buffer.data(), static_cast<Py_ssize_t>(buffer.size()), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_buffer)}, {0, nullptr}};

BufferObject* pinned_empty(nb::handle bytes_value, nb::handle device, nb::handle engine_value) {
  const std::uint64_t bytes = size_argument(bytes_value, "nbytes");
  std::optional<Engine> engine = engine_argument(engine_value);
  if (!device.is_none() && !nb::str(device).equal(nb::str("cpu"))) {
    raise(make_error(ErrorKind::unsupported,
                     std::string("device: pinned memory for ") + nb::str(device).c_str() +
                         " is not supported by this build; leave device out for memory that is "
                         "locked by the kernel"));
  }
  Result<Buffer> buffer = [&]() -> Result<Buffer> {
    const GilReleased unlocked;
    if (!engine) {
      Result<Engine> process_engine = Engine::default_engine();
      if (!process_engine) return std::unexpected(process_engine.error());
      engine = *std::move(process_engine);
    }
    return engine->allocate(bytes);
  }();
  return new BufferObject(unwrap(std::move(buffer)));
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
      "the budget gets its bytes back when the last view of it is gone.")
      .def_prop_ro(
          "nbytes", [](const BufferObject& self) { return self.buffer.size(); }, "Size in bytes (int).")
      .def_prop_ro(
          "locked", [](const BufferObject& self) { return self.buffer.locked(); },
          "Whether the kernel locked it against swapping, which RLIMIT_MEMLOCK may forbid (bool).")
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

  module.def("pinned_empty", &pinned_empty, "nbytes"_a.none(), "device"_a = nb::none(), nb::kw_only(),
             "engine"_a = nb::none(),
             nb::sig("def pinned_empty(nbytes: int | str, device: str | None = None, *, engine: Engine | "
                     "None = None) -> Buffer"),
             "Page-aligned memory, locked against swapping where RLIMIT_MEMLOCK allows: transfers land in it "
             "without a copy.\n\n"
             "`nbytes` is an int or a str such as \"400MB\". Raises OutOfBudget when the engine's "
             "pinned_budget_bytes (of\n"
             "the default engine without `engine`) cannot hold it beside what is in use, Unsupported for a "
             "`device` other\n"
             "than \"cpu\".");
  module.def("aligned_empty", &aligned_empty, "nbytes"_a.none(),
             nb::sig("def aligned_empty(nbytes: int) -> Buffer"),
             "Page-aligned zeros of no budget, not locked: for what is loaded and stays.");
}

}  // namespace trunkline::python
