#include "device/gds/api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace trunkline::cufile {
namespace {

struct Named {
  int code;
  std::string_view name;
};
// Those that a caller can meet; after the reference's table of error codes.
constexpr auto kNames = std::to_array<Named>({
    {5001, "the nvidia-fs driver is not loaded"},
    {5004, "the driver's version does not match the library's"},
    {5006, "the driver is closing"},
    {5007, "not supported on this platform"},
    {5008, "not supported on this file's storage"},
    {5009, "this GPU is not supported"},
    {5010, "an error of the nvidia-fs driver"},
    {5011, "an error of the CUDA driver"},
    {5012, "an invalid device pointer"},
    {5013, "memory that was not allocated by cuMemAlloc"},
    {5014, "a range beyond the allocation"},
    {5016, "more memory than the GPU can map for others"},
    {5018, "a file of another type than it can use"},
    {5019, "a file opened in a way that it cannot use"},
    {5022, "an invalid value"},
    {5023, "memory that is registered already"},
    {5025, "permission denied"},
    {5028, "a file that is registered already"},
    {5030, "an internal error"},
    {5033, "the nvidia-fs driver could not be set up"},
    {5034, "I/O was disabled"},
    {5036, "too little memory of the GPU could be pinned"},
    {5038, "stream-ordered calls are not supported"},
    {5043, "out of memory"},
    {5044, "an I/O error"},
});

std::string describe(int code) {
  const auto* found = std::ranges::find(kNames, code, &Named::code);
  return found != kNames.end() ? fmt::format("{} ({})", found->name, code) : fmt::format("error {}", code);
}

}  // namespace

Result<Api> load(const std::string& library) {
  const auto refused = [&](const std::string& why) {
    return std::unexpected(
        make_error(ErrorKind::unsupported, fmt::format("GPUDirect Storage: {}: {}", library, why), library));
  };
  // Never closed: it has threads and exit handlers of its own.
  void* opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    const char* text = ::dlerror();  // NOLINT(concurrency-mt-unsafe): thread-safe in glibc
    return refused(text != nullptr ? text : "dlopen gave no reason");
  }
  Api api{};
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    void* address = ::dlsym(opened, symbol);
    if (address == nullptr && missing.empty()) missing = symbol;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find(api.DriverOpen, "cuFileDriverOpen");
  find(api.DriverGetProperties, "cuFileDriverGetProperties");
  find(api.HandleRegister, "cuFileHandleRegister");
  find(api.HandleDeregister, "cuFileHandleDeregister");
  find(api.BufRegister, "cuFileBufRegister");
  find(api.BufDeregister, "cuFileBufDeregister");
  find(api.StreamRegister, "cuFileStreamRegister");
  find(api.StreamDeregister, "cuFileStreamDeregister");
  find(api.ReadAsync, "cuFileReadAsync");
  find(api.WriteAsync, "cuFileWriteAsync");
  if (!missing.empty()) return refused(fmt::format("it does not have {}; CUDA 12.2 and newer do", missing));
  return api;
}

Error error_of(Outcome outcome, std::string_view function, std::string_view action) {
  const std::string of_cuda =
      outcome.cuda_code != cuda::kSuccess ? fmt::format(", CUDA error {}", outcome.cuda_code) : "";
  return make_error(ErrorKind::device,
                    fmt::format("cannot {}: {}: {}{}", action, function, describe(outcome.code), of_cuda));
}

Error error_of_result(ssize_t moved, std::string_view action) {
  constexpr ssize_t kFirstCode = 5000;  // below: an errno value, or -1 for an I/O error that it does not name
  if (moved < -1 && -moved < kFirstCode) {
    const int code = static_cast<int>(-moved);
    return {ErrorKind::system, code, fmt::format("cannot {}: {}", action, errno_reason(code)), {}};
  }
  if (-moved >= kFirstCode)
    return make_error(ErrorKind::device,
                      fmt::format("cannot {}: cuFile: {}", action, describe(static_cast<int>(-moved))));
  return make_error(ErrorKind::device, moved < 0
                                           ? fmt::format("cannot {}: cuFile reports an I/O error", action)
                                           : fmt::format("cannot {}: cuFile moved {} bytes", action, moved));
}

}  // namespace trunkline::cufile
