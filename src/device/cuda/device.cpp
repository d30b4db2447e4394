#include "device/cuda/device.h"

#include <fmt/format.h>

#include "device/cuda/copy_queue.h"
#include "device/cuda/fence.h"
#include "device/gds/file.h"
#include "device/gds/memory.h"
#include "device/gds/queue.h"
#include "os/fork_generation.h"

namespace trunkline::cuda {

Result<std::unique_ptr<CudaDevice>> CudaDevice::open(const Driver& driver, unsigned ordinal,
                                                     cufile::Session& gds) {
  const Api& api = driver.api;
  const auto action = [&] { return fmt::format("open cuda:{}", ordinal); };
  int count = 0;
  if (const Code code = api.DeviceGetCount(&count); code != kSuccess)
    return std::unexpected(error_of(api, code, "cuDeviceGetCount", action()));
  if (ordinal >= static_cast<unsigned>(count)) {
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format("cannot open cuda:{}: this process sees {} CUDA device{}, numbered from 0; see "
                    "nvidia-smi and CUDA_VISIBLE_DEVICES",
                    ordinal, count, count == 1 ? "" : "s")));
  }
  Ordinal device = 0;
  if (const Code code = api.DeviceGet(&device, static_cast<int>(ordinal)); code != kSuccess)
    return std::unexpected(error_of(api, code, "cuDeviceGet", action()));
  Context context = nullptr;
  if (const Code code = api.DevicePrimaryCtxRetain(&context, device); code != kSuccess)
    return std::unexpected(error_of(api, code, "cuDevicePrimaryCtxRetain", action()));
  return std::unique_ptr<CudaDevice>(new CudaDevice(api, ordinal, context, gds));
}

CudaDevice::CudaDevice(const Api& api, unsigned ordinal, Context context, cufile::Session& gds)
    : api_(&api),
      name_(fmt::format("cuda:{}", ordinal)),
      context_(context),
      gds_(gds),
      generation_(os::fork_generation()) {}

Status CudaDevice::usable() const {
  if (os::fork_generation() == generation_) return {};
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format("{} cannot be used in a forked child of a process that has used CUDA; start processes by "
                  "spawn, as torch.multiprocessing does",
                  name_)));
}

Result<std::unique_ptr<CopyQueue>> CudaDevice::open_queue(std::function<void()> on_completion) {
  return open_copy_queue(*this, std::move(on_completion));
}

Result<Fence> CudaDevice::fence(void* stream) {
  const auto failed = [&](Code code, std::string_view function) {
    return std::unexpected(error_of(*api_, code, function, fmt::format("order work on {}", name_)));
  };
  if (auto status = usable(); !status) return std::unexpected(status.error());
  const ScopedContext context(*this);
  if (context.code() != kSuccess) return failed(context.code(), "cuCtxPushCurrent");
  // An event that is recorded on such a stream becomes part of the graph, and is never reached.
  int capturing = kNotCapturing;
  const Code asked = api_->StreamIsCapturing(static_cast<Stream>(stream), &capturing);
  if (asked == kCaptureImplicit || (asked == kSuccess && capturing != kNotCapturing)) {
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format("cannot order work on {}: a CUDA graph is being captured; read and write files outside "
                    "of graphs",
                    name_)));
  }
  if (asked != kSuccess) return failed(asked, "cuStreamIsCapturing");
  Event event = nullptr;
  if (const Code code = api_->EventCreate(&event, kEventDisableTiming); code != kSuccess)
    return failed(code, "cuEventCreate");
  auto recorded = std::make_shared<const RecordedEvent>(*this, event);
  if (const Code code = api_->EventRecord(event, static_cast<Stream>(stream)); code != kSuccess)
    return failed(code, "cuEventRecord");
  return recorded;
}

Result<std::shared_ptr<void>> CudaDevice::allocate(std::uint64_t bytes) {
  const auto failed = [&](Code code, std::string_view function) {
    return std::unexpected(
        error_of(*api_, code, function, fmt::format("allocate {} bytes on {}", bytes, name_)));
  };
  if (auto status = usable(); !status) return std::unexpected(status.error());
  const ScopedContext context(*this);
  if (context.code() != kSuccess) return failed(context.code(), "cuCtxPushCurrent");
  DevicePointer memory = 0;
  if (const Code code = api_->MemAlloc(&memory, bytes); code != kSuccess) return failed(code, "cuMemAlloc");
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are numbers
  return std::shared_ptr<void>(reinterpret_cast<void*>(memory), [this, memory](void*) {
    const ScopedContext again(*this);
    if (again.code() == kSuccess) api_->MemFree(memory);
  });
}

Result<std::shared_ptr<const void>> CudaDevice::pin(std::span<std::byte> memory) {
  const auto failed = [&](Code code, std::string_view function) {
    return std::unexpected(
        error_of(*api_, code, function, fmt::format("pin {} bytes of memory for {}", memory.size(), name_)));
  };
  if (auto status = usable(); !status) return std::unexpected(status.error());
  const ScopedContext context(*this);
  if (context.code() != kSuccess) return failed(context.code(), "cuCtxPushCurrent");
  if (const Code code = api_->MemHostRegister(memory.data(), memory.size(), kHostRegisterPortable);
      code != kSuccess)
    return failed(code, "cuMemHostRegister");
  return std::shared_ptr<const void>(memory.data(), [this](const void* data) {
    const ScopedContext again(*this);
    if (again.code() == kSuccess) api_->MemHostUnregister(const_cast<void*>(data));
  });
}

Result<std::shared_ptr<const GdsFile>> CudaDevice::open_gds(const GdsSource& source, GdsProbe probe) {
  if (auto status = usable(); !status) return std::unexpected(status.error());
  return cufile::open_file(*this, source, probe);
}

Result<std::unique_ptr<GdsQueue>> CudaDevice::open_gds_queue(std::function<void()> on_completion) {
  if (auto status = usable(); !status) return std::unexpected(status.error());
  return cufile::open_queue(*this, std::move(on_completion));
}

Result<std::shared_ptr<const void>> CudaDevice::register_for_gds(std::span<std::byte> memory) {
  if (auto status = usable(); !status) return std::unexpected(status.error());
  return cufile::register_memory(*this, memory);
}

}  // namespace trunkline::cuda
