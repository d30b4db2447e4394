#include "device/cuda/context_thread.h"

#include <pthread.h>

#include <future>
#include <system_error>
#include <utility>

#include "os/signals_blocked.h"

namespace trunkline::cuda {

Status ContextThread::start(const CudaDevice& device, const char* name, std::string_view action,
                            std::function<void()> work) {
  if (thread_.joinable()) return {};
  std::promise<Code> entered;
  auto code = entered.get_future();
  {
    const os::SignalsBlocked blocked;
    try {
      thread_ = std::thread([&device, name, &entered, work = std::move(work)] {
        pthread_setname_np(pthread_self(), name);
        const ScopedContext context(device);
        const Code refused = context.code();
        entered.set_value(refused);
        if (refused == kSuccess) work();
      });
    } catch (const std::system_error& refused) {
      return std::unexpected(system_error(refused.code().value(), "start a thread that waits for a GPU"));
    }
  }
  if (const Code refused = code.get(); refused != kSuccess) {
    thread_.join();
    return std::unexpected(error_of(device.api(), refused, "cuCtxPushCurrent", action));
  }
  return {};
}

}  // namespace trunkline::cuda
