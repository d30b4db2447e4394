// What a process keeps of cuFile.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/gds/api.h"
#include "device/gds/filesystem_probes.h"
#include "device/gds/memory.h"

namespace trunkline::cufile {

// Why GPUDirect Storage cannot be used for any file of this machine, as far as that can be determined without
// opening anything; nullopt where it may be possible.
std::optional<std::string> why_unavailable();

// cuFile's driver, opened at first use, and all that others must find again: the memory that is registered
// with it, and the results of its probes. One in a process, owned by its CudaProcess: it lives until the
// process ends. Thread-safe.
class Session {
 public:
  // Loads the library and opens the driver, unless that is done. The calling thread has a CUDA context.
  Result<const Api*> open_driver();

  RegisteredMemory& memory() { return memory_; }
  FilesystemProbes& probes() { return probes_; }

  // Keeps what cuFile's own threads may still use after a context was lost: nothing reports when they stop.
  void keep_forever(std::shared_ptr<const void> work);

 private:
  std::mutex mutex_;
  std::unique_ptr<const Api> api_;  // null until the driver is open
  std::vector<std::shared_ptr<const void>> kept_;
  RegisteredMemory memory_;
  FilesystemProbes probes_;
};

}  // namespace trunkline::cufile
