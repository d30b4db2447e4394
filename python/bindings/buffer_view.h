// The bytes of a Python object: torch tensors, the buffer protocol, numpy arrays of any dtype, DLPack, and
// objects that expose memory of a GPU by __cuda_array_interface__.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "dlpack.h"
#include "trunkline/memory.h"

namespace trunkline::python {

enum class Access { read_only, writable };
enum class Reach { host, devices };  // which memory will do

// A view of an exporter of the buffer protocol, released at destruction.
struct ExportedBuffer {
  ExportedBuffer() = default;
  ExportedBuffer(const ExportedBuffer&) = delete;
  ExportedBuffer& operator=(const ExportedBuffer&) = delete;
  ~ExportedBuffer() {
    if (view.obj != nullptr) PyBuffer_Release(&view);
  }
  Py_buffer view{};  // its obj is set while it is granted
};

// Contiguous memory of a Python object, kept alive and (for exporters of the buffer protocol) unresizable for
// as long as the BufferView lives. Neither copyable nor movable, since an exporter may know the
// Py_buffer by its address. All members but memory() need the GIL.
class BufferView {
 public:
  // Tried in this order: torch.Tensor (recognised without importing torch), buffer
  // protocol, numpy's __array_interface__ (dtypes that the buffer protocol has no letter for: bfloat16,
  // datetime64), __cuda_array_interface__, DLPack. Raises TypeError for anything but a buffer, ValueError for
  // memory that is not contiguous, or read-only where `access` is writable, Unsupported for memory of a
  // device where `reach` is the host, or is not a CUDA device. `name`: of the argument, for errors.
  // `stream` (see stream_argument) is the one whose work comes first, in place of the one that the object
  // names; None leaves that. With one, memory of the host raises ValueError.
  BufferView(nanobind::handle buffer, Access access, const char* name = "buffer", Reach reach = Reach::host,
             nanobind::handle stream = nanobind::none());
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  const MemoryView& memory() const { return memory_; }

  // Keeps the memory also when a torch tensor is given another storage (Module.half(), tensor.data = other,
  // set_()) while the view lives, at the price of a call into torch. Resizing the storage itself still frees
  // it.
  void keep_storage();

 private:
  struct Wanted {
    nanobind::handle buffer;
    Access access;
    const char* name;
    Reach reach;
    std::optional<void*> stream;
  };

  void take(const Wanted& wanted);
  bool take_plain_torch(const Wanted& wanted);
  void take_torch(const Wanted& wanted);
  bool take_buffer_protocol(const Wanted& wanted);
  bool take_numpy(const Wanted& wanted);
  bool take_cuda_array(const Wanted& wanted);
  bool take_dlpack(const Wanted& wanted);

  MemoryView memory_;
  // One of these keeps the memory alive.
  ExportedBuffer exported_;
  nanobind::object owner_;
  nanobind::object storage_;  // of an owner that is a tensor
  DlpackTensor dlpack_;
};

}  // namespace trunkline::python
