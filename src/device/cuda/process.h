// What a process keeps of CUDA, and of cuFile.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "device/cuda/device.h"
#include "device/cuda/host_memory.h"
#include "device/gds/session.h"
#include "os/fork_generation.h"
#include "trunkline/device.h"

namespace trunkline::cuda {

// The driver, loaded at first use, the devices that were opened, and what is registered with either. The only
// global of src/device: it is never destroyed, since contexts, and what others made in them, live as long as
// the process. Thread-safe.
class CudaProcess {
 public:
  // Fails with `unsupported` in a forked child of a process that has loaded the driver.
  static Result<CudaProcess*> current();

  // See trunkline/device.h.
  Result<CudaInfo> info();
  Result<Device*> device(unsigned ordinal);
  Result<unsigned> device_of(const void* address);
  std::optional<unsigned> device_in_use();

  RegisteredHostMemory& host_memory() { return host_memory_; }
  cufile::Session& gds() { return gds_; }

 private:
  const Result<Driver>& driver_locked();

  const unsigned generation_ = os::fork_generation();
  std::atomic<bool> loaded_{false};
  std::mutex mutex_;
  std::string library_;                     // of driver_
  std::unique_ptr<Result<Driver>> driver_;  // null until first use
  RegisteredHostMemory host_memory_;
  cufile::Session gds_;
  std::map<unsigned, std::unique_ptr<CudaDevice>> devices_;  // by ordinal
};

}  // namespace trunkline::cuda
