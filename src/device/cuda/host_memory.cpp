// Host memory that is registered with the CUDA driver: trunkline/device.h.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "device/device.h"
#include "mem/pinned_budget.h"
#include "os/fork_generation.h"
#include "trunkline/device.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

using Pin = std::shared_ptr<const void>;
using Charge = std::shared_ptr<const void>;  // gives its bytes back to the budget

Result<Charge> charge(std::shared_ptr<PinnedBudget> budget, std::uint64_t bytes) {
  if (budget == nullptr) return Charge();
  if (!budget->take(bytes)) {
    return std::unexpected(
        make_error(ErrorKind::out_of_budget,
                   fmt::format("buffer: pinning {}: the budget of {} has {} in use; free buffers or raise "
                               "pinned_budget_bytes",
                               format_bytes(bytes), format_bytes(budget->limit_bytes()),
                               format_bytes(budget->used_bytes()))));
  }
  const void* const any = budget.get();  // a null pointer would not be a charge
  return Charge(any, [budget = std::move(budget), bytes](const void*) { budget->give_back(bytes); });
}

// Ranges that do not overlap, by start address. The memory of a range is locked, and counts in the budget, as
// long as anybody holds any part of it: so it is the range that is charged, and not who holds it.
class RegisteredMemory {
 public:
  Result<Pin> add(Device& device, std::span<std::byte> memory, std::shared_ptr<PinnedBudget> budget) {
    if (Pin shared = hold_covering(memory)) return shared;
    // Before the lock: what the budget gives up for it may be registered, too.
    auto charged = charge(std::move(budget), memory.size());
    if (!charged) return std::unexpected(charged.error());
    const std::scoped_lock lock(mutex_);
    if (Pin shared = hold_covering_locked(memory)) return shared;
    if (const std::uint64_t known = overlap_locked(memory); known > 0) {
      return std::unexpected(make_error(
          ErrorKind::device,
          fmt::format("pinning {} bytes of host memory: {} of them are pinned already, by another pin that "
                      "does not cover the rest; close that one first, or pin the whole before its parts",
                      memory.size(), known)));
    }
    auto pinned = device.pin(memory);
    if (!pinned) return std::unexpected(pinned.error());
    const std::uintptr_t start = start_of(memory);
    ranges_.emplace(start,
                    Range{.bytes = memory.size(), .charge = *std::move(charged), .pin = *std::move(pinned)});
    return hold_locked(start);
  }

 private:
  struct Range {
    std::uint64_t bytes = 0;
    Charge charge = {};  // until after the pin has gone
    Pin pin = {};
    unsigned holders = 0;
  };

  static std::uintptr_t start_of(std::span<std::byte> memory) {
    return reinterpret_cast<std::uintptr_t>(memory.data());
  }

  Pin hold_covering(std::span<std::byte> memory) {
    const std::scoped_lock lock(mutex_);
    return hold_covering_locked(memory);
  }

  Pin hold_covering_locked(std::span<std::byte> memory) {
    const std::uintptr_t start = start_of(memory);
    auto found = ranges_.upper_bound(start);
    if (found == ranges_.begin()) return nullptr;
    --found;
    const std::uintptr_t end = found->first + found->second.bytes;
    return start + memory.size() <= end ? hold_locked(found->first) : nullptr;
  }

  // Bytes of the memory that are registered.
  std::uint64_t overlap_locked(std::span<std::byte> memory) const {
    const std::uintptr_t start = start_of(memory);
    const std::uintptr_t end = start + memory.size();
    std::uint64_t known = 0;
    for (const auto& [from, range] : ranges_) {
      const std::uintptr_t first = std::max(start, from);
      const std::uintptr_t last = std::min(end, from + range.bytes);
      if (first < last) known += last - first;
    }
    return known;
  }

  Pin hold_locked(std::uintptr_t start) {
    ++ranges_.at(start).holders;
    // In a forked child the range is its parent's, and the lock may be held forever.
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
                                                         std::optional<unsigned> ordinal,
                                                         std::shared_ptr<PinnedBudget> budget) {
  if (memory.empty()) return Pin();
  if (!ordinal) ordinal = cuda_device_in_use().value_or(0);
  const auto device = cuda_device(*ordinal);
  if (!device) return std::unexpected(device.error());
  return registered_memory().add(**device, memory, std::move(budget));
}

}  // namespace trunkline
