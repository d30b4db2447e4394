#include "device/cuda/api.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace trunkline::cuda {
namespace {

std::string dl_error() {
  const char* text = ::dlerror();  // NOLINT(concurrency-mt-unsafe): thread-safe in glibc
  return text != nullptr ? text : "dlopen gave no reason";
}

}  // namespace

bool is_loaded(const std::string& library) {
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle != nullptr) ::dlclose(handle);
  return handle != nullptr;
}

Result<Driver> load_driver(const std::string& library) {
  const auto refused = [&](const std::string& why) {
    return std::unexpected(
        make_error(ErrorKind::unsupported, fmt::format("CUDA: {}: {}", library, why), library));
  };
  // Never closed: the driver has threads and exit handlers of its own.
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const std::string why = dl_error();
    if (!why.ends_with("cannot open shared object file: No such file or directory")) return refused(why);
    return std::unexpected(
        make_error(ErrorKind::unsupported,
                   fmt::format("no NVIDIA driver is installed here ({} was not found)", library), library));
  }

  Driver driver{.api = {}, .library = library};
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    void* address = ::dlsym(handle, symbol);
    if (address == nullptr && missing.empty()) missing = symbol;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  Api& api = driver.api;
  find(api.Init, "cuInit");
  find(api.DriverGetVersion, "cuDriverGetVersion");
  find(api.GetErrorName, "cuGetErrorName");
  find(api.GetErrorString, "cuGetErrorString");
  find(api.DeviceGetCount, "cuDeviceGetCount");
  find(api.DeviceGet, "cuDeviceGet");
  find(api.DeviceGetName, "cuDeviceGetName");
  find(api.DeviceTotalMem, "cuDeviceTotalMem_v2");
  find(api.DeviceGetAttribute, "cuDeviceGetAttribute");
  find(api.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(api.DevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState");
  find(api.CtxPushCurrent, "cuCtxPushCurrent_v2");
  find(api.CtxPopCurrent, "cuCtxPopCurrent_v2");
  find(api.StreamCreate, "cuStreamCreate");
  find(api.StreamDestroy, "cuStreamDestroy_v2");
  find(api.StreamSynchronize, "cuStreamSynchronize");
  find(api.StreamWaitEvent, "cuStreamWaitEvent");
  find(api.StreamIsCapturing, "cuStreamIsCapturing");
  find(api.ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  find(api.EventCreate, "cuEventCreate");
  find(api.EventRecord, "cuEventRecord");
  find(api.EventSynchronize, "cuEventSynchronize");
  find(api.EventDestroy, "cuEventDestroy_v2");
  find(api.MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  find(api.MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
  find(api.MemAlloc, "cuMemAlloc_v2");
  find(api.MemFree, "cuMemFree_v2");
  find(api.MemHostRegister, "cuMemHostRegister_v2");
  find(api.MemHostUnregister, "cuMemHostUnregister");
  find(api.PointerGetAttribute, "cuPointerGetAttribute");
  if (!missing.empty()) return refused(fmt::format("it does not have {}; a newer driver does", missing));

  if (const Code code = api.Init(0); code != kSuccess)
    return refused(error_of(api, code, "cuInit", "initialize the driver").message);
  if (const Code code = api.DriverGetVersion(&driver.version); code != kSuccess)
    return refused(error_of(api, code, "cuDriverGetVersion", "read its version").message);
  return driver;
}

Error error_of(const Api& api, Code code, std::string_view function, std::string_view action) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.GetErrorName(code, &name) != kSuccess || name == nullptr) name = "an unknown error";
  if (api.GetErrorString(code, &text) != kSuccess || text == nullptr) text = "no description";
  return make_error(ErrorKind::device,
                    fmt::format("cannot {}: {}: {} ({}, {})", action, function, name, code, text));
}

}  // namespace trunkline::cuda
