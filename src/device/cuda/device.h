// A GPU behind the Device interface.
#pragma once

#include <memory>
#include <string>

#include "device/cuda/api.h"
#include "device/device.h"

namespace trunkline::cuda {

class CudaDevice final : public Device {
 public:
  // Retains the primary context of a device, the one that torch and others use.
  static Result<std::unique_ptr<CudaDevice>> open(const Driver& driver, unsigned ordinal);

  std::string_view name() const override { return name_; }
  bool host_accessible() const override { return false; }
  Result<std::unique_ptr<CopyQueue>> open_queue(std::function<void()> on_ended) override;
  Result<Fence> fence(void* stream) override;
  Result<std::shared_ptr<void>> allocate(std::uint64_t bytes) override;
  Result<std::shared_ptr<const void>> pin(std::span<std::byte> memory) override;
  Result<std::shared_ptr<const GdsFile>> open_gds(const GdsSource& source, GdsProbe proof) override;
  Result<std::unique_ptr<GdsQueue>> open_gds_queue(std::function<void()> on_ended) override;
  Result<std::shared_ptr<const void>> register_for_gds(std::span<std::byte> memory) override;

  // `unsupported` in a forked child of the process that opened it.
  Status usable() const;

  const Api& api() const { return *api_; }
  Context context() const { return context_; }

 private:
  CudaDevice(const Api& api, unsigned ordinal, Context context);

  const Api* api_;
  std::string name_;
  Context context_;
  const unsigned generation_;  // of forks
};

// The context is the calling thread's current one while this lives; then the one before is again. What the
// thread calls meanwhile has nothing to do with graphs that are captured, and must not spoil them. In a
// forked child, where no function of the driver may be called, it is refused: what was made before the fork
// is left alone there.
class Current {
 public:
  explicit Current(const CudaDevice& device)
      : api_(device.api()), code_(device.usable() ? api_.CtxPushCurrent(device.context()) : kNotInitialized) {
    if (code_ == kSuccess) api_.ThreadExchangeStreamCaptureMode(&capture_mode_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    if (code_ != kSuccess) return;
    Context popped = nullptr;
    api_.ThreadExchangeStreamCaptureMode(&capture_mode_);
    api_.CtxPopCurrent(&popped);
  }
  Code code() const { return code_; }  // kSuccess, or why nothing can be done

 private:
  const Api& api_;
  const Code code_;
  int capture_mode_ = kRelaxedCapture;  // of the thread, once exchanged: the one before
};

}  // namespace trunkline::cuda
