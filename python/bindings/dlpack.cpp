#include "dlpack.h"

#include <fmt/format.h>

#include <cstddef>

#include "arguments.h"
#include "errors.h"

namespace trunkline::python {

namespace nb = nanobind;

namespace {

// The structures of the DLPack specification; their layout is its ABI.
struct Dtype {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  Dtype dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: C order
  std::uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};
struct VersionedManagedTensor {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(VersionedManagedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};
struct ExchangeTable {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeTable* older;
  void* allocate;
  void* lend;
  void* take_back;
  int (*view)(void* object, Tensor* out);  // 0, or an exception is set; what it says lives as long as object
  void* stream;
};
constexpr std::uint8_t kComplexCode = 5;
constexpr std::uint64_t kFlagReadOnly = 1;
constexpr std::uint64_t kFlagCopied = 2;
constexpr std::uint64_t kFlagSubbytePadded = 4;

const Tensor& tensor_of(const void* managed, bool versioned) {
  return versioned ? static_cast<const VersionedManagedTensor*>(managed)->tensor
                   : static_cast<const ManagedTensor*>(managed)->tensor;
}

std::uint64_t flags_of(const void* managed, bool versioned) {
  return versioned ? static_cast<const VersionedManagedTensor*>(managed)->flags : 0;
}

std::uint64_t elements(const Tensor& tensor) {
  std::uint64_t count = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) count *= static_cast<std::uint64_t>(tensor.shape[i]);
  return count;
}

bool in_c_order(const Tensor& tensor) {
  if (tensor.strides == nullptr || elements(tensor) == 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

nb::object request_capsule(nb::handle producer, std::optional<std::uintptr_t> stream) {
  const nb::object method = producer.attr("__dlpack__");
  const nb::tuple version = nb::make_tuple(1, 0);
  try {
    if (stream) return method(nb::arg("stream") = *stream, nb::arg("max_version") = version);
    return method(nb::arg("max_version") = version);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError))
      throw;  // TypeError: a producer older than version 1 does not accept max_version
  }
  return stream ? method(nb::arg("stream") = *stream) : method();
}

}  // namespace

DlpackTensor::~DlpackTensor() {
  if (tensor_ == nullptr) return;
  if (versioned_) {
    auto* managed = static_cast<VersionedManagedTensor*>(tensor_);
    if (managed->deleter != nullptr) managed->deleter(managed);
  } else {
    auto* managed = static_cast<ManagedTensor*>(tensor_);
    if (managed->deleter != nullptr) managed->deleter(managed);
  }
}

DlpackTensor DlpackTensor::borrow_from(nb::handle producer, std::optional<std::uintptr_t> stream) {
  const nb::object capsule = request_capsule(producer, stream);
  DlpackTensor borrowed;
  borrowed.versioned_ = PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0;
  const char* name = borrowed.versioned_ ? "dltensor_versioned" : "dltensor";
  void* managed = PyCapsule_GetPointer(capsule.ptr(), name);
  if (managed == nullptr) throw nb::python_error();
  if (borrowed.versioned_ && static_cast<VersionedManagedTensor*>(managed)->major != 1) {
    raise_value_error(fmt::format("buffer: {} exports DLPack version {}, which is newer than 1",
                                  shown_type(producer),
                                  static_cast<VersionedManagedTensor*>(managed)->major));
  }
  // By the protocol, a renamed capsule no longer releases the tensor: the consumer does.
  if (PyCapsule_SetName(capsule.ptr(), borrowed.versioned_ ? "used_dltensor_versioned" : "used_dltensor") !=
      0) {
    throw nb::python_error();
  }
  borrowed.tensor_ = managed;
  return borrowed;
}

std::byte* DlpackTensor::data() const {
  const Tensor& tensor = tensor_of(tensor_, versioned_);
  return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

std::uint64_t DlpackTensor::bytes() const {
  const Tensor& tensor = tensor_of(tensor_, versioned_);
  const std::uint64_t bits = std::uint64_t{tensor.dtype.bits} * tensor.dtype.lanes;
  if (bits % 8 != 0 && (flags_of(tensor_, versioned_) & kFlagSubbytePadded) != 0) {
    return elements(tensor) * ((bits + 7) / 8);
  }
  return (elements(tensor) * bits + 7) / 8;
}

bool DlpackTensor::contiguous() const { return in_c_order(tensor_of(tensor_, versioned_)); }

bool DlpackTensor::read_only() const { return (flags_of(tensor_, versioned_) & kFlagReadOnly) != 0; }
bool DlpackTensor::copied() const { return (flags_of(tensor_, versioned_) & kFlagCopied) != 0; }

std::optional<DlpackExchange> DlpackExchange::of(nb::handle type) {
  PyObject* capsule = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  void* table = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_XDECREF(capsule);
  PyErr_Clear();
  const auto* functions = static_cast<const ExchangeTable*>(table);
  if (functions == nullptr || functions->major != 1 || functions->view == nullptr) return std::nullopt;
  return DlpackExchange(table);
}

std::optional<DlpackView> DlpackExchange::describe(nb::handle tensor) const {
  Tensor seen{};
  if (static_cast<const ExchangeTable*>(table_)->view(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::uint64_t bits = std::uint64_t{seen.dtype.bits} * seen.dtype.lanes;
  const bool on_host = seen.device_type == kDlpackCpu || seen.device_type == kDlpackCudaHost;
  if (!on_host || bits % 8 != 0) return std::nullopt;
  return DlpackView{.data = static_cast<std::byte*>(seen.data) + seen.byte_offset,
                    .bytes = elements(seen) * (bits / 8),
                    .contiguous = in_c_order(seen),
                    .complex = seen.dtype.code == kComplexCode};
}

}  // namespace trunkline::python
