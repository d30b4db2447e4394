// The process's CUDA driver and devices: trunkline/device.h.
#include <fmt/format.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "base/log.h"
#include "device/cuda/device.h"
#include "os/fork_generation.h"
#include "trunkline/device.h"

namespace trunkline {
namespace {

using cuda::Code;
using cuda::kSuccess;

// Another library with the same symbols, for tests.
std::string driver_library() {
  const char* named = std::getenv("TRUNKLINE_CUDA_DRIVER");  // NOLINT(concurrency-mt-unsafe)
  return named != nullptr ? named : "libcuda.so.1";
}

// Loaded at first use, and kept: contexts and what others made in them live as long as the process.
class Registry {
 public:
  Result<Device*> device(unsigned ordinal) {
    const std::scoped_lock lock(mutex_);
    auto found = devices_.find(ordinal);
    if (found != devices_.end()) return found->second.get();
    const auto& loaded = driver();
    if (!loaded) return std::unexpected(loaded.error());
    auto opened = cuda::CudaDevice::open(*loaded, ordinal);
    if (!opened) return std::unexpected(opened.error());
    log::info(log::Component::device, "cuda:{} is used, by the driver {}", ordinal, driver_library());
    return devices_.emplace(ordinal, std::move(*opened)).first->second.get();
  }

  Result<unsigned> device_of(const void* address) {
    const std::scoped_lock lock(mutex_);
    const auto& loaded = driver();
    if (!loaded) return std::unexpected(loaded.error());
    int ordinal = 0;
    const Code code = loaded->api.PointerGetAttribute(&ordinal, cuda::kPointerDeviceOrdinal,
                                                      reinterpret_cast<cuda::DevicePointer>(address));
    if (code != kSuccess) {
      Error error = error_of(loaded->api, code, "cuPointerGetAttribute",
                             fmt::format("finding the GPU of the memory at {}", address));
      error.kind = ErrorKind::invalid_argument;
      return std::unexpected(std::move(error));
    }
    return static_cast<unsigned>(ordinal);
  }

  std::optional<unsigned> device_in_use() {
    const std::scoped_lock lock(mutex_);
    if (!loaded_.load() && !cuda::is_loaded(driver_library())) return std::nullopt;
    const auto& loaded = driver();
    int count = 0;
    if (!loaded || loaded->api.DeviceGetCount(&count) != kSuccess) return std::nullopt;
    for (int index = 0; index < count; ++index) {
      cuda::Ordinal device = 0;
      unsigned flags = 0;
      int active = 0;
      if (loaded->api.DeviceGet(&device, index) == kSuccess &&
          loaded->api.DevicePrimaryCtxGetState(device, &flags, &active) == kSuccess && active != 0)
        return static_cast<unsigned>(index);
    }
    return std::nullopt;
  }

  Result<CudaInfo> info() {
    const std::scoped_lock lock(mutex_);
    const auto& loaded = driver();
    if (!loaded) return std::unexpected(loaded.error());
    const cuda::Api& api = loaded->api;
    CudaInfo info{.version = loaded->version, .library = loaded->library, .devices = {}};
    int count = 0;
    if (const Code code = api.DeviceGetCount(&count); code != kSuccess)
      return std::unexpected(error_of(api, code, "cuDeviceGetCount", "counting CUDA devices"));
    for (int index = 0; index < count; ++index) {
      auto described = describe(api, index);
      if (!described) return std::unexpected(described.error());
      info.devices.push_back(std::move(*described));
    }
    return info;
  }

  unsigned generation() const { return generation_; }
  bool loaded() const { return loaded_.load(); }

 private:
  // One that was found stays; where there was none, another library may have been named since.
  const Result<cuda::Driver>& driver() {
    const std::string library = driver_library();
    if (driver_ == nullptr || (!*driver_ && library != tried_)) {
      driver_ = std::make_unique<Result<cuda::Driver>>(cuda::load_driver(library));
      tried_ = library;
      loaded_.store(driver_->has_value());
    }
    return *driver_;
  }

  static Result<CudaDeviceInfo> describe(const cuda::Api& api, int index) {
    CudaDeviceInfo info;
    info.ordinal = static_cast<unsigned>(index);
    cuda::Ordinal device = 0;
    std::array<char, 256> name{};
    std::size_t bytes = 0;
    Code code = api.DeviceGet(&device, index);
    if (code == kSuccess) code = api.DeviceGetName(name.data(), name.size(), device);
    if (code == kSuccess) code = api.DeviceTotalMem(&bytes, device);
    const auto attribute = [&](cuda::DeviceAttribute which) {
      int value = 0;
      if (code == kSuccess) code = api.DeviceGetAttribute(&value, which, device);
      return value;
    };
    info.pci =
        fmt::format("{:04x}:{:02x}:{:02x}.0", attribute(cuda::DeviceAttribute::pci_domain),
                    attribute(cuda::DeviceAttribute::pci_bus), attribute(cuda::DeviceAttribute::pci_device));
    info.compute_capability = attribute(cuda::DeviceAttribute::compute_major) * 10 +
                              attribute(cuda::DeviceAttribute::compute_minor);
    if (code != kSuccess)
      return std::unexpected(
          error_of(api, code, "cuDeviceGetAttribute", fmt::format("looking at cuda:{}", index)));
    int rdma = 0;  // older drivers do not know the question
    info.direct_rdma =
        api.DeviceGetAttribute(&rdma, cuda::DeviceAttribute::gpu_direct_rdma, device) == kSuccess &&
        rdma != 0;
    info.name = name.data();
    info.memory_bytes = bytes;
    return info;
  }

  const unsigned generation_ = os::fork_generation();
  std::atomic<bool> loaded_{false};
  std::mutex mutex_;
  std::string tried_;
  std::unique_ptr<Result<cuda::Driver>> driver_;
  std::map<unsigned, std::unique_ptr<cuda::CudaDevice>> devices_;
};

// A forked child of a process that has loaded no driver begins anew, with a lock that nobody holds.
Result<Registry*> registry() {
  static std::atomic<Registry*> kept{nullptr};  // used until the very end
  Registry* known = kept.load();
  while (known == nullptr || known->generation() != os::fork_generation()) {
    if (known != nullptr && known->loaded()) {
      return std::unexpected(
          make_error(ErrorKind::unsupported,
                     "CUDA cannot be used in a forked child of a process that has used it; start processes "
                     "by spawn, as torch.multiprocessing does"));
    }
    auto made = std::make_unique<Registry>();
    if (kept.compare_exchange_strong(known, made.get())) return made.release();
  }
  return known;
}

}  // namespace

Result<CudaInfo> cuda_info() {
  const auto known = registry();
  if (!known) return std::unexpected(known.error());
  return (*known)->info();
}
Result<Device*> cuda_device(unsigned ordinal) {
  const auto known = registry();
  if (!known) return std::unexpected(known.error());
  return (*known)->device(ordinal);
}
Result<unsigned> cuda_device_of(const void* address) {
  const auto known = registry();
  if (!known) return std::unexpected(known.error());
  return (*known)->device_of(address);
}
std::optional<unsigned> cuda_device_in_use() {
  const auto known = registry();
  return known ? (*known)->device_in_use() : std::nullopt;
}
std::string_view name_of(const Device& device) { return device.name(); }

}  // namespace trunkline
