// Host memory that is registered with the CUDA driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "device/device.h"
#include "mem/pinned_budget.h"

namespace trunkline::cuda {

// Keeps a range registered while it exists.
using Pin = std::shared_ptr<const void>;

// The registered ranges. They do not overlap. A range stays registered, and counts against the budget that it
// was registered with, while anybody holds a Pin of any part of it. Thread-safe. Lives as long as the
// process.
class RegisteredHostMemory {
 public:
  // See register_host_memory(), trunkline/device.h. `memory` is not empty.
  Result<Pin> add(Device& device, std::span<std::byte> memory, std::shared_ptr<PinnedBudget> budget);

 private:
  using Charge = std::shared_ptr<const void>;  // gives its bytes back to the budget

  struct Range {
    std::uint64_t bytes = 0;
    Charge charge = {};  // released after the pin
    Pin pin = {};
    unsigned holders = 0;
  };

  static Result<Charge> charge(std::shared_ptr<PinnedBudget> budget, std::uint64_t bytes);
  Pin hold_covering(std::span<std::byte> memory);
  Pin hold_covering_locked(std::span<std::byte> memory);
  std::uint64_t registered_bytes_locked(std::span<std::byte> memory) const;
  Pin hold_locked(std::uintptr_t start);
  void release(std::uintptr_t start);

  std::mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;  // by start address
};

}  // namespace trunkline::cuda
