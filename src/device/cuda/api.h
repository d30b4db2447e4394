// The functions of the CUDA driver that Trunkline uses, found by dlopen: building does not require CUDA, and
// one build runs with and without it. Declared according to the CUDA Driver API reference;
// python/tests/test_nvidia_headers.py compares with NVIDIA's headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::cuda {

using Code = int;  // CUresult
using Ordinal = int;
using DevicePointer = std::uint64_t;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;

inline constexpr Code kSuccess = 0;
inline constexpr Code kNotInitialized = 3;
inline constexpr Code kCaptureImplicit = 906;  // of the default stream, while another is captured
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr int kPointerDeviceOrdinal = 9;
inline constexpr int kNotCapturing = 0;
inline constexpr int kRelaxedCapture = 2;

enum DeviceAttribute : int {
  pci_bus = 33,
  pci_device = 34,
  pci_domain = 50,
  compute_major = 75,
  compute_minor = 76,
  gpu_direct_rdma = 116,
};

// Named like those of the driver, without "cu"; a comment gives the suffix of the version.
// NOLINTBEGIN(readability-identifier-naming)
struct Api {
  Code (*Init)(unsigned flags);
  Code (*DriverGetVersion)(int* version);
  Code (*GetErrorName)(Code code, const char** name);
  Code (*GetErrorString)(Code code, const char** text);
  Code (*DeviceGetCount)(int* count);
  Code (*DeviceGet)(Ordinal* device, int index);
  Code (*DeviceGetName)(char* name, int bytes, Ordinal device);
  Code (*DeviceTotalMem)(std::size_t* bytes, Ordinal device);  // _v2
  Code (*DeviceGetAttribute)(int* value, int attribute, Ordinal device);
  Code (*DevicePrimaryCtxRetain)(Context* context, Ordinal device);
  Code (*DevicePrimaryCtxGetState)(Ordinal device, unsigned* flags, int* active);
  Code (*CtxPushCurrent)(Context context);  // _v2
  Code (*CtxPopCurrent)(Context* context);  // _v2
  Code (*StreamCreate)(Stream* stream, unsigned flags);
  Code (*StreamDestroy)(Stream stream);  // _v2
  Code (*StreamSynchronize)(Stream stream);
  Code (*StreamWaitEvent)(Stream stream, Event event, unsigned flags);
  Code (*StreamIsCapturing)(Stream stream, int* status);
  Code (*ThreadExchangeStreamCaptureMode)(int* mode);
  Code (*EventCreate)(Event* event, unsigned flags);
  Code (*EventRecord)(Event event, Stream stream);
  Code (*EventSynchronize)(Event event);
  Code (*EventDestroy)(Event event);                                                                    // _v2
  Code (*MemcpyHtoDAsync)(DevicePointer target, const void* source, std::size_t bytes, Stream stream);  // _v2
  Code (*MemcpyDtoHAsync)(void* target, DevicePointer source, std::size_t bytes, Stream stream);        // _v2
  Code (*MemAlloc)(DevicePointer* memory, std::size_t bytes);                                           // _v2
  Code (*MemFree)(DevicePointer memory);                                                                // _v2
  Code (*MemHostRegister)(void* memory, std::size_t bytes, unsigned flags);                             // _v2
  Code (*MemHostUnregister)(void* memory);
  Code (*PointerGetAttribute)(void* value, int attribute, DevicePointer address);
};
// NOLINTEND(readability-identifier-naming)

// A driver that is loaded and initialised.
struct Driver {
  Api api;
  std::string library;
  int version = 0;
};

// Whether this process has loaded `library` already.
bool is_loaded(const std::string& library);

// Loads `library` and calls cuInit. `unsupported`, saying what is missing, where it cannot be used.
Result<Driver> load_driver(const std::string& library);

// "cannot ACTION: FUNCTION: ...": `action` as in "open cuda:0", `function` as in "cuMemHostRegister".
Error error_of(const Api& api, Code code, std::string_view function, std::string_view action);

}  // namespace trunkline::cuda
