// Host memory that is registered with the CUDA driver: trunkline/device.h.
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "device/device.h"
#include "os/fork_generation.h"
#include "trunkline/device.h"

namespace trunkline {
namespace {

using Pin = std::shared_ptr<const void>;

// By start address. The driver takes no range twice, and what is registered may be asked for again while it
// is: holders are counted.
class RegisteredMemory {
 public:
  Result<Pin> add(Device& device, std::span<std::byte> memory) {
    const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
    const std::scoped_lock lock(mutex_);
    auto found = ranges_.upper_bound(start);
    if (found != ranges_.begin()) {
      --found;
      if (start + memory.size() <= found->first + found->second.bytes) return hold(found->first);
    }
    auto pinned = device.pin(memory);
    if (!pinned) return std::unexpected(pinned.error());
    ranges_[start] = {.bytes = memory.size(), .pin = std::move(*pinned)};
    return hold(start);
  }

 private:
  struct Range {
    std::uint64_t bytes = 0;
    Pin pin = {};
    unsigned holders = 0;
  };

  Pin hold(std::uintptr_t start) {
    ++ranges_[start].holders;
    // In a forked child the range is its parent's, and the lock may be held for good.
    return {static_cast<const void*>(this), [this, start, generation = os::fork_generation()](const void*) {
              if (generation == os::fork_generation()) drop(start);
            }};
  }

  void drop(std::uintptr_t start) {
    const std::scoped_lock lock(mutex_);  // while the driver lets go too: nobody registers it before
    const auto found = ranges_.find(start);
    if (--found->second.holders == 0) ranges_.erase(found);
  }

  std::mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;
};

RegisteredMemory& registered_memory() {
  static auto* kept = new RegisteredMemory;  // NOLINT(cppcoreguidelines-owning-memory): until the very end
  return *kept;
}

}  // namespace

Result<std::shared_ptr<const void>> register_host_memory(std::span<std::byte> memory,
                                                         std::optional<unsigned> ordinal) {
  if (memory.empty()) return Pin();
  if (!ordinal) ordinal = cuda_device_in_use().value_or(0);
  const auto device = cuda_device(*ordinal);
  if (!device) return std::unexpected(device.error());
  return registered_memory().add(**device, memory);
}

}  // namespace trunkline
