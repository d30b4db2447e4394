#include "device/cuda/process.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <utility>

#include "base/log.h"

namespace trunkline {
namespace cuda {
namespace {

std::string driver_library() {
  // Set by tests to a library with the same symbols.
  const char* const path = std::getenv("TRUNKLINE_CUDA_DRIVER");  // NOLINT(concurrency-mt-unsafe)
  return path != nullptr ? path : "libcuda.so.1";
}

Result<CudaDeviceInfo> describe(const Api& api, int index) {
  CudaDeviceInfo info;
  info.ordinal = static_cast<unsigned>(index);
  Ordinal device = 0;
  std::array<char, 256> name{};
  std::size_t bytes = 0;
  Code code = api.DeviceGet(&device, index);
  if (code == kSuccess) code = api.DeviceGetName(name.data(), name.size(), device);
  if (code == kSuccess) code = api.DeviceTotalMem(&bytes, device);
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    if (code == kSuccess) code = api.DeviceGetAttribute(&value, which, device);
    return value;
  };
  info.pci = fmt::format("{:04x}:{:02x}:{:02x}.0", attribute(DeviceAttribute::pci_domain),
                         attribute(DeviceAttribute::pci_bus), attribute(DeviceAttribute::pci_device));
  info.compute_capability =
      attribute(DeviceAttribute::compute_major) * 10 + attribute(DeviceAttribute::compute_minor);
  if (code != kSuccess)
    return std::unexpected(
        error_of(api, code, "cuDeviceGetAttribute", fmt::format("read the attributes of cuda:{}", index)));
  int rdma = 0;  // older drivers do not have this attribute
  info.direct_rdma =
      api.DeviceGetAttribute(&rdma, DeviceAttribute::gpu_direct_rdma, device) == kSuccess && rdma != 0;
  info.name = name.data();
  info.memory_bytes = bytes;
  return info;
}

}  // namespace

Result<CudaProcess*> CudaProcess::current() {
  static std::atomic<CudaProcess*> instance{nullptr};
  CudaProcess* known = instance.load();
  while (known == nullptr || known->generation_ != os::fork_generation()) {
    if (known != nullptr && known->loaded_.load()) {
      return std::unexpected(
          make_error(ErrorKind::unsupported,
                     "CUDA cannot be used in a forked child of a process that has used it; start processes "
                     "by spawn, as torch.multiprocessing does"));
    }
    // If the parent has not loaded the driver, a forked child gets a new object: a thread
    // of the parent, which the child does not have, may have held the mutex of the parent's.
    auto made = std::make_unique<CudaProcess>();
    if (instance.compare_exchange_strong(known, made.get())) return made.release();
  }
  return known;
}

Result<CudaInfo> CudaProcess::info() {
  const std::scoped_lock lock(mutex_);
  const auto& loaded = driver_locked();
  if (!loaded) return std::unexpected(loaded.error());
  const Api& api = loaded->api;
  CudaInfo info{.version = loaded->version, .library = loaded->library, .devices = {}};
  int count = 0;
  if (const Code code = api.DeviceGetCount(&count); code != kSuccess)
    return std::unexpected(error_of(api, code, "cuDeviceGetCount", "count CUDA devices"));
  for (int index = 0; index < count; ++index) {
    auto described = describe(api, index);
    if (!described) return std::unexpected(described.error());
    info.devices.push_back(std::move(*described));
  }
  return info;
}

Result<Device*> CudaProcess::device(unsigned ordinal) {
  const std::scoped_lock lock(mutex_);
  const auto found = devices_.find(ordinal);
  if (found != devices_.end()) return found->second.get();
  const auto& loaded = driver_locked();
  if (!loaded) return std::unexpected(loaded.error());
  auto opened = CudaDevice::open(*loaded, ordinal, gds_);
  if (!opened) return std::unexpected(opened.error());
  log::info(log::Component::device, "cuda:{} is used, by the driver {}", ordinal, loaded->library);
  return devices_.emplace(ordinal, *std::move(opened)).first->second.get();
}

Result<unsigned> CudaProcess::device_of(const void* address) {
  const std::scoped_lock lock(mutex_);
  const auto& loaded = driver_locked();
  if (!loaded) return std::unexpected(loaded.error());
  int ordinal = 0;
  const Code code = loaded->api.PointerGetAttribute(&ordinal, kPointerDeviceOrdinal,
                                                    reinterpret_cast<DevicePointer>(address));
  if (code != kSuccess) {
    Error error = error_of(loaded->api, code, "cuPointerGetAttribute",
                           fmt::format("find the GPU of the memory at {}", address));
    error.kind = ErrorKind::invalid_argument;
    return std::unexpected(std::move(error));
  }
  return static_cast<unsigned>(ordinal);
}

std::optional<unsigned> CudaProcess::device_in_use() {
  const std::scoped_lock lock(mutex_);
  if (!loaded_.load() && !is_loaded(driver_library())) return std::nullopt;
  const auto& loaded = driver_locked();
  int count = 0;
  if (!loaded || loaded->api.DeviceGetCount(&count) != kSuccess) return std::nullopt;
  for (int index = 0; index < count; ++index) {
    Ordinal device = 0;
    unsigned flags = 0;
    int active = 0;
    if (loaded->api.DeviceGet(&device, index) == kSuccess &&
        loaded->api.DevicePrimaryCtxGetState(device, &flags, &active) == kSuccess && active != 0)
      return static_cast<unsigned>(index);
  }
  return std::nullopt;
}

// A driver that was found stays. Where none was, the environment may name another library by now.
const Result<Driver>& CudaProcess::driver_locked() {
  const std::string library = driver_library();
  if (driver_ == nullptr || (!*driver_ && library != library_)) {
    driver_ = std::make_unique<Result<Driver>>(load_driver(library));
    library_ = library;
    loaded_.store(driver_->has_value());
  }
  return *driver_;
}

}  // namespace cuda

Result<CudaInfo> cuda_info() {
  const auto process = cuda::CudaProcess::current();
  if (!process) return std::unexpected(process.error());
  return (*process)->info();
}

Result<Device*> cuda_device(unsigned ordinal) {
  const auto process = cuda::CudaProcess::current();
  if (!process) return std::unexpected(process.error());
  return (*process)->device(ordinal);
}

Result<unsigned> cuda_device_of(const void* address) {
  const auto process = cuda::CudaProcess::current();
  if (!process) return std::unexpected(process.error());
  return (*process)->device_of(address);
}

std::optional<unsigned> cuda_device_in_use() {
  const auto process = cuda::CudaProcess::current();
  return process ? (*process)->device_in_use() : std::nullopt;
}

Result<std::shared_ptr<const void>> register_host_memory(std::span<std::byte> memory,
                                                         std::optional<unsigned> ordinal,
                                                         std::shared_ptr<PinnedBudget> budget) {
  if (memory.empty()) return cuda::Pin();
  const auto process = cuda::CudaProcess::current();
  if (!process) return std::unexpected(process.error());
  if (!ordinal) ordinal = (*process)->device_in_use().value_or(0);
  const auto device = (*process)->device(*ordinal);
  if (!device) return std::unexpected(device.error());
  return (*process)->host_memory().add(**device, memory, std::move(budget));
}

std::string_view name_of(const Device& device) { return device.name(); }

}  // namespace trunkline
