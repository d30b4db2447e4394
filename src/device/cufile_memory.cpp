#include "device/cufile_memory.h"

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "device/cufile_driver.h"
#include "os/fork_generation.h"

namespace trunkline::cufile {
namespace {

using Hold = std::shared_ptr<const void>;

// By start address; holders are counted, transfers under way among them: cuFile must not lose memory that it
// works on.
class RegisteredRanges {
 public:
  Result<Hold> add(const cuda::CudaDevice& device, const Api& api, std::span<std::byte> memory) {
    const std::scoped_lock lock(mutex_);
    if (Registered found = find_locked(memory); found.hold != nullptr) return std::move(found.hold);
    const cuda::Current current(device);
    const auto action = [&] { return fmt::format("registering memory of {}", device.name()); };
    if (current.code() != cuda::kSuccess)
      return std::unexpected(error_of(device.api(), current.code(), "cuCtxPushCurrent", action()));
    const Outcome outcome = api.BufRegister(memory.data(), memory.size(), 0);
    if (outcome.code != kSuccess) return std::unexpected(error_of(outcome, "cuFileBufRegister", action()));
    ranges_[memory.data()] = {.bytes = memory.size(), .device = &device, .api = &api};
    return hold(memory.data());
  }

  Registered find(std::span<std::byte> memory) {
    const std::scoped_lock lock(mutex_);
    return find_locked(memory);
  }

 private:
  struct Range {
    std::uint64_t bytes = 0;
    const cuda::CudaDevice* device = nullptr;
    const Api* api = nullptr;
    unsigned holders = 0;
  };

  Registered find_locked(std::span<std::byte> memory) {
    auto found = ranges_.upper_bound(memory.data());
    if (found != ranges_.begin()) {
      --found;
      if (memory.data() + memory.size() <= found->first + found->second.bytes)
        return {.base = found->first, .hold = hold(found->first)};
    }
    return {.base = memory.data(), .hold = nullptr};
  }

  Hold hold(std::byte* base) {
    ++ranges_[base].holders;
    // In a forked child the range is its parent's, and the lock may be held for good.
    return {static_cast<const void*>(base), [this, base, generation = os::fork_generation()](const void*) {
              if (generation == os::fork_generation()) drop(base);
            }};
  }

  void drop(std::byte* base) {
    const std::scoped_lock lock(mutex_);  // while cuFile lets go too: nobody registers it before
    const auto found = ranges_.find(base);
    if (--found->second.holders != 0) return;
    const cuda::Current current(*found->second.device);
    if (current.code() == cuda::kSuccess) found->second.api->BufDeregister(base);
    ranges_.erase(found);
  }

  std::mutex mutex_;
  std::map<std::byte*, Range> ranges_;
};

RegisteredRanges& ranges() {
  static auto* kept = new RegisteredRanges;  // NOLINT(cppcoreguidelines-owning-memory): until the very end
  return *kept;
}

}  // namespace

Result<std::shared_ptr<const void>> register_memory(const cuda::CudaDevice& device,
                                                    std::span<std::byte> memory) {
  if (memory.empty() || why_not_here()) return Hold();
  const cuda::Current current(device);
  const auto api = open_driver();
  if (!api) return std::unexpected(api.error());
  return ranges().add(device, **api, memory);
}

Registered find_registered(std::span<std::byte> memory) { return ranges().find(memory); }

}  // namespace trunkline::cufile
