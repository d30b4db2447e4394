// A GPU behind the Device interface.
#pragma once

#include <memory>
#include <string>

#include "device/cuda/api.h"
#include "device/device.h"

namespace trunkline::cufile {
class Session;
}

namespace trunkline::cuda {

class CudaDevice final : public Device {
 public:
  // Retains the primary context of a device, the one that torch and others use. `driver` and `gds` outlive
  // the device.
  static Result<std::unique_ptr<CudaDevice>> open(const Driver& driver, unsigned ordinal,
                                                  cufile::Session& gds);

  std::string_view name() const override { return name_; }
  bool host_accessible() const override { return false; }
  Result<std::unique_ptr<CopyQueue>> open_queue(std::function<void()> on_completion) override;
  Result<Fence> fence(void* stream) override;
  Result<std::shared_ptr<void>> allocate(std::uint64_t bytes) override;
  Result<std::shared_ptr<const void>> pin(std::span<std::byte> memory) override;
  Result<std::shared_ptr<const GdsFile>> open_gds(const GdsSource& source, GdsProbe probe) override;
  Result<std::unique_ptr<GdsQueue>> open_gds_queue(std::function<void()> on_completion) override;
  Result<std::shared_ptr<const void>> register_for_gds(std::span<std::byte> memory) override;

  // `unsupported` in a forked child of the process that opened it.
  Status usable() const;

  const Api& api() const { return *api_; }
  Context context() const { return context_; }
  cufile::Session& gds() const { return gds_; }

 private:
  CudaDevice(const Api& api, unsigned ordinal, Context context, cufile::Session& gds);

  const Api* api_;
  std::string name_;
  Context context_;
  cufile::Session& gds_;
  const unsigned generation_;  // of forks
};

// Makes the device's context the calling thread's current one while it exists, and restores the previous one.
// What the thread calls meanwhile is not part of graphs that are being captured, and does not invalidate
// them. Fails in a forked child, where no function of the driver may be called: what was made before the fork
// is left as it is there.
class ScopedContext {
 public:
  explicit ScopedContext(const CudaDevice& device)
      : api_(device.api()), code_(device.usable() ? api_.CtxPushCurrent(device.context()) : kNotInitialized) {
    if (code_ == kSuccess) api_.ThreadExchangeStreamCaptureMode(&capture_mode_);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  ~ScopedContext() {
    if (code_ != kSuccess) return;
    Context popped = nullptr;
    api_.ThreadExchangeStreamCaptureMode(&capture_mode_);
    api_.CtxPopCurrent(&popped);
  }
  Code code() const { return code_; }  // kSuccess, or why it failed

 private:
  const Api& api_;
  const Code code_;
  int capture_mode_ = kRelaxedCapture;  // after the exchange: the previous mode of the thread
};

}  // namespace trunkline::cuda
