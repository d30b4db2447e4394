// A thread that waits for work of a device.
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

  // Runs `work` on the thread with the device's context, unless it runs already. Fails where the thread
  // cannot have the context: then no work may be started on the device, since nobody could wait for it.
  // `action`: for the message.
  Status start(const CudaDevice& device, const char* name, std::string_view action,
               std::function<void()> work);

  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace trunkline::cuda
