// A thread that waits for a device's work.
#pragma once

#include <functional>
#include <string_view>
#include <thread>

#include "device/cuda/device.h"

namespace trunkline::cuda {

class ContextThread {
 public:
  ContextThread() = default;
  ContextThread(const ContextThread&) = delete;
  ContextThread& operator=(const ContextThread&) = delete;
  ~ContextThread() { join(); }

  // Runs `work` with the device's context, if it does not run yet. What is begun on a device must be waited
  // for, so the thread that does it has the context before anything begins: fails where it cannot. `action`:
  // for the message.
  Status start(const CudaDevice& device, const char* name, std::string_view action,
               std::function<void()> work);

  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace trunkline::cuda
