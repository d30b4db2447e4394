// Memory and streams of a GPU, as Python objects describe them.
#pragma once

#include <nanobind/nanobind.h>

#include "trunkline/memory.h"

namespace trunkline::python {

// The GPU that the argument `name` is on. Raises Unsupported where there is none.
Device* cuda_device_number(unsigned ordinal, const char* name);

// Torch's current stream of the tensor's device: a CUstream.
void* torch_stream(nanobind::handle tensor);

// A stream argument: a CUstream as an int, or an object of torch, CuPy, Numba or cuda.core. Raises TypeError
// for anything else.
void* stream_argument(nanobind::handle value, const char* name);

// What __cuda_array_interface__ (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, up to
// version 3) shows.
struct CudaArray {
  MemoryView memory;  // with device and stream
  bool read_only = false;
  bool contiguous = false;  // in C order
};
CudaArray cuda_array(nanobind::handle interface, const char* name);

}  // namespace trunkline::python
