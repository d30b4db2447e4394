#include "buffer_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "arguments.h"
#include "cuda_objects.h"
#include "errors.h"

namespace trunkline::python {

namespace nb = nanobind;

namespace {

[[noreturn]] void refuse_strided(const char* name, nb::handle buffer, std::string_view remedy) {
  raise_value_error(fmt::format("{}: the memory of this {} is not contiguous (in C order); use {}", name,
                                shown_type(buffer), remedy));
}

[[noreturn]] void refuse_read_only(const char* name, nb::handle buffer) {
  raise_value_error(
      fmt::format("{}: the memory of this {} is read-only and cannot be read into; use a writable one, such "
                  "as a bytearray, numpy.empty or torch.empty",
                  name, shown_type(buffer)));
}

[[noreturn]] void refuse_objects(const char* name, nb::handle buffer) {
  raise_value_error(
      fmt::format("{}: this {} holds references to Python objects, not bytes", name, shown_type(buffer)));
}

[[noreturn]] void refuse_device(const char* name, nb::handle buffer, std::string_view device) {
  raise(make_error(
      ErrorKind::unsupported,
      fmt::format("{}: this {} is on the device {}, which is not supported here; go through a tensor on the "
                  "CPU (tensor.cpu(), tensor.copy_())",
                  name, shown_type(buffer), device)));
}

constexpr std::string_view kNumpyRemedy =
    "numpy.ascontiguousarray() for a write, or read into a contiguous array and copy";
constexpr std::string_view kTorchRemedy =
    ".contiguous() for a write, or read into a contiguous tensor and copy_() from it";

// The parts of torch that views of tensors need, looked up once the program has imported torch. The
// references are kept as long as the process, like torch itself.
struct TorchNames {
  PyTypeObject* tensor;
  PyObject* strided;
  PyObject* increment_version;             // nullptr where this torch has none
  std::optional<DlpackExchange> exchange;  // from torch 2.9 on

  static const TorchNames* find() {
    static std::optional<TorchNames> found;
    if (found) return &*found;
    PyObject* modules = PyImport_GetModuleDict();  // borrowed
    PyObject* torch = PyDict_GetItemString(modules, "torch");
    if (torch == nullptr) return nullptr;
    const nb::object tensor = nb::getattr(torch, "Tensor", nb::none());
    const nb::object strided = nb::getattr(torch, "strided", nb::none());
    if (!PyType_Check(tensor.ptr()) || strided.is_none()) return nullptr;  // torch is being imported
    nb::object increment =
        nb::getattr(nb::getattr(torch, "_C", nb::none()), "_increment_version", nb::none());
    found = TorchNames{.tensor = reinterpret_cast<PyTypeObject*>(nb::object(tensor).release().ptr()),
                       .strided = nb::object(strided).release().ptr(),
                       .increment_version = increment.is_none() ? nullptr : increment.release().ptr(),
                       .exchange = DlpackExchange::of(tensor)};
    return &*found;
  }
};

// Interned, so that an attribute is found by comparing pointers.
struct Names {
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* layout = PyUnicode_InternFromString("layout");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");

  static const Names& get() {
    static const Names names;
    return names;
  }
};

nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

nb::object call_method(nb::handle object, PyObject* name) {
  PyObject* self = object.ptr();
  PyObject* value = PyObject_VectorcallMethod(name, &self, 1, nullptr);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

// Like every operation of torch that changes a tensor in place: backward() through its former values then
// raises instead of computing wrong gradients.
void count_write(nb::handle tensor) {
  PyObject* increment = TorchNames::find()->increment_version;
  if (increment == nullptr) return;
  const nb::object tensors = nb::steal(PyTuple_Pack(1, tensor.ptr()));
  if (!tensors.is_valid()) throw nb::python_error();
  PyObject* argument = tensors.ptr();
  PyObject* done = PyObject_Vectorcall(increment, &argument, 1, nullptr);
  if (done == nullptr) throw nb::python_error();
  Py_DECREF(done);
}

// Types that have the buffer protocol and no interface that is tried before it: no search is needed.
bool is_builtin_buffer(nb::handle buffer) {
  return PyMemoryView_Check(buffer.ptr()) || PyByteArray_CheckExact(buffer.ptr()) ||
         PyBytes_CheckExact(buffer.ptr());
}

// Whether a format of the struct module's syntax (as PEP 3118 extends it) has an object reference outside of
// the names of fields, which are between colons.
bool has_objects(const char* format) {
  bool in_name = false;
  for (; format != nullptr && *format != '\0'; ++format) {
    if (*format == ':') in_name = !in_name;
    if (!in_name && *format == 'O') return true;
  }
  return false;
}

}  // namespace

BufferView::BufferView(nb::handle buffer, Access access, const char* name, Reach reach, nb::handle stream) {
  Wanted wanted{buffer, access, name, reach, std::nullopt};
  if (!stream.is_none()) wanted.stream = stream_argument(stream, "stream");
  take(wanted);
  if (!wanted.stream) return;
  if (memory_.device == nullptr && memory_.bytes > 0)
    raise_value_error("stream: only for buffers in the memory of a GPU; omit it");
  memory_.stream = *wanted.stream;
}

void BufferView::take(const Wanted& wanted) {
  if (!is_builtin_buffer(wanted.buffer)) {
    const TorchNames* torch = TorchNames::find();
    if (torch != nullptr && PyObject_TypeCheck(wanted.buffer.ptr(), torch->tensor)) {
      if (!take_plain_torch(wanted)) take_torch(wanted);
      if (wanted.access == Access::writable) count_write(wanted.buffer);
      return;
    }
  }
  if (take_buffer_protocol(wanted) || take_numpy(wanted) || take_cuda_array(wanted) || take_dlpack(wanted))
    return;
  raise_type_error(fmt::format(
      "{}: must be a tensor, an array or another object with the buffer protocol or DLPack, not {}",
      wanted.name, shown_type(wanted.buffer)));
}

void BufferView::keep_storage() {
  const TorchNames* torch = TorchNames::find();
  if (!owner_.is_valid() || torch == nullptr || !PyObject_TypeCheck(owner_.ptr(), torch->tensor)) return;
  storage_ = call_method(owner_, Names::get().untyped_storage);
}

// The fast path, for plain tensors that need no error message.
bool BufferView::take_plain_torch(const Wanted& wanted) {
  const TorchNames& torch = *TorchNames::find();
  if (!torch.exchange || Py_TYPE(wanted.buffer.ptr()) != torch.tensor) return false;
  const std::optional<DlpackView> seen = torch.exchange->describe(wanted.buffer);
  if (!seen || !seen->contiguous || (seen->data == nullptr && seen->bytes != 0)) return false;
  // A tensor with one of these bits shows other values than its memory holds.
  const Names& names = Names::get();
  if (call_method(wanted.buffer, names.is_neg).ptr() == Py_True) return false;
  if (seen->complex && call_method(wanted.buffer, names.is_conj).ptr() == Py_True) return false;
  memory_ = {seen->data, seen->bytes};
  owner_ = nb::borrow(wanted.buffer);
  return true;
}

void BufferView::take_torch(const Wanted& wanted) {
  const Names& names = Names::get();
  const nb::handle tensor = wanted.buffer;
  const bool on_host = attribute(tensor, names.is_cpu).ptr() == Py_True;
  if (!on_host && (wanted.reach == Reach::host || !nb::cast<bool>(tensor.attr("is_cuda")))) {
    refuse_device(wanted.name, tensor, nb::str(nb::getattr(tensor, "device")).c_str());
  }
  if (attribute(tensor, names.layout).ptr() != TorchNames::find()->strided) {
    raise_value_error(
        fmt::format("{}: this {} has the layout {}; only dense (strided) tensors are bytes in a row, use "
                    ".to_dense() or its parts",
                    wanted.name, shown_type(tensor), nb::str(nb::getattr(tensor, "layout")).c_str()));
  }
  if (call_method(tensor, names.is_contiguous).ptr() != Py_True)
    refuse_strided(wanted.name, tensor, kTorchRemedy);
  // A tensor with one of these bits shows other values than its memory holds.
  if (call_method(tensor, names.is_neg).ptr() == Py_True) {
    raise_value_error(
        fmt::format("{}: this tensor is a lazily negated view; use .resolve_neg()", wanted.name));
  }
  if (call_method(tensor, names.is_conj).ptr() == Py_True) {
    raise_value_error(
        fmt::format("{}: this tensor is a lazily conjugated view; use .resolve_conj()", wanted.name));
  }
  const std::uint64_t bytes = PyLong_AsUnsignedLongLong(attribute(tensor, names.nbytes).ptr());
  void* data = PyLong_AsVoidPtr(call_method(tensor, names.data_ptr).ptr());
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  if (data == nullptr && bytes != 0) {
    raise_value_error(fmt::format("{}: this {} has no memory of its own", wanted.name, shown_type(tensor)));
  }
  memory_ = {static_cast<std::byte*>(data), bytes};
  if (!on_host) {
    memory_.device = cuda_device_number(nb::cast<unsigned>(tensor.attr("get_device")()), wanted.name);
    if (!wanted.stream) memory_.stream = torch_stream(tensor);
  }
  owner_ = nb::borrow(tensor);
}

bool BufferView::take_buffer_protocol(const Wanted& wanted) {
  if (PyObject_CheckBuffer(wanted.buffer.ptr()) == 0) return false;
  const bool writable = wanted.access == Access::writable;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  Py_buffer& view = exported_.view;
  if (PyObject_GetBuffer(wanted.buffer.ptr(), &view, flags) == 0) {
    if (has_objects(view.format)) refuse_objects(wanted.name, wanted.buffer);
    memory_ = {static_cast<std::byte*>(view.buf), static_cast<std::uint64_t>(view.len)};
    return true;
  }
  view.obj = nullptr;
  const nb::python_error refusal;
  // To find out why, request a view without any requirements.
  if (PyObject_GetBuffer(wanted.buffer.ptr(), &view, PyBUF_FULL_RO) != 0) {
    view.obj = nullptr;
    PyErr_Clear();
    return false;  // a dtype without a letter: another interface has it
  }
  if (writable && view.readonly != 0) refuse_read_only(wanted.name, wanted.buffer);
  if (PyBuffer_IsContiguous(&view, 'C') == 0) refuse_strided(wanted.name, wanted.buffer, kNumpyRemedy);
  throw refusal;
}

bool BufferView::take_numpy(const Wanted& wanted) {
  const nb::object dtype = nb::getattr(wanted.buffer, "dtype", nb::none());
  const nb::object has_object = nb::getattr(dtype, "hasobject", nb::none());
  if (!PyBool_Check(has_object.ptr()) || !nb::hasattr(wanted.buffer, "__array_interface__")) return false;
  if (has_object.ptr() == Py_True) refuse_objects(wanted.name, wanted.buffer);
  const nb::object interface = wanted.buffer.attr("__array_interface__");
  const nb::object data = interface["data"];
  if (wanted.access == Access::writable && nb::cast<bool>(data[1]))
    refuse_read_only(wanted.name, wanted.buffer);
  // numpy gives strides exactly when they are not those of C order.
  if (!interface.attr("get")("strides").is_none()) refuse_strided(wanted.name, wanted.buffer, kNumpyRemedy);
  std::uint64_t bytes = count_argument(dtype.attr("itemsize"), "buffer.dtype.itemsize");
  for (const nb::handle extent : interface["shape"]) {
    if (__builtin_mul_overflow(bytes, count_argument(extent, "buffer.shape"), &bytes))
      raise_value_error(fmt::format("{}: its shape holds more than 2^64 bytes", wanted.name));
  }
  memory_ = {reinterpret_cast<std::byte*>(count_argument(data[0], "buffer.data")), bytes};
  owner_ = nb::borrow(wanted.buffer);
  return true;
}

bool BufferView::take_cuda_array(const Wanted& wanted) {
  const nb::object interface = nb::getattr(wanted.buffer, "__cuda_array_interface__", nb::none());
  if (interface.is_none()) return false;
  if (wanted.reach == Reach::host) refuse_device(wanted.name, wanted.buffer, "of a CUDA array");
  const CudaArray array = cuda_array(interface, wanted.name);
  if (wanted.access == Access::writable && array.read_only) refuse_read_only(wanted.name, wanted.buffer);
  if (!array.contiguous) refuse_strided(wanted.name, wanted.buffer, "a contiguous copy");
  memory_ = array.memory;
  owner_ = nb::borrow(wanted.buffer);
  return true;
}

bool BufferView::take_dlpack(const Wanted& wanted) {
  if (!nb::hasattr(wanted.buffer, "__dlpack__") || !nb::hasattr(wanted.buffer, "__dlpack_device__"))
    return false;
  const nb::object device = wanted.buffer.attr("__dlpack_device__")();
  const int type = nb::cast<int>(device[0]);
  const bool on_gpu = type == kDlpackCuda && wanted.reach == Reach::devices;
  Device* gpu = on_gpu ? cuda_device_number(nb::cast<unsigned>(device[1]), wanted.name) : nullptr;
  if (type != kDlpackCpu && type != kDlpackCudaHost && type != kDlpackRocmHost && !on_gpu) {
    refuse_device(wanted.name, wanted.buffer, fmt::format("DLPack device type {}", type));
  }
  // The producer makes the stream wait for its own pending work.
  const auto stream = reinterpret_cast<std::uintptr_t>(wanted.stream.value_or(nullptr));
  DlpackTensor tensor = DlpackTensor::borrow_from(
      wanted.buffer, on_gpu ? std::optional(std::max(stream, kDlpackLegacyStream)) : std::nullopt);
  const bool writable = wanted.access == Access::writable;
  if (writable && tensor.read_only()) refuse_read_only(wanted.name, wanted.buffer);
  if (writable && tensor.copied()) {
    raise_value_error(fmt::format("{}: this {} lends only copies of its memory; what was read would be lost",
                                  wanted.name, shown_type(wanted.buffer)));
  }
  if (!tensor.contiguous()) refuse_strided(wanted.name, wanted.buffer, "a contiguous copy");
  memory_ = {tensor.data(), tensor.bytes()};
  memory_.device = gpu;
  dlpack_ = std::move(tensor);
  return true;
}

}  // namespace trunkline::python
