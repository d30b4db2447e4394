// Blocks for data on its way between tensors and files. They are kept for the next use when they come back:
// the kernel takes longer to provide new memory than to copy into it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "mem/pinned_budget.h"
#include "trunkline/buffer.h"

namespace trunkline {

struct StagingBlock {
  Buffer memory;
  std::shared_ptr<const void> pin = {};  // of Device::pin, once a device has worked with it
};

// Thread-safe. What is kept counts in the budget, and goes when the budget runs short (PinnedBudget).
class StagingPool {
 public:
  static constexpr std::uint64_t kBlockBytes = 4ULL << 20;

  explicit StagingPool(std::shared_ptr<PinnedBudget> budget) : budget_(std::move(budget)) {}

  // A block of kBlockBytes, with whatever it held before; out_of_budget when none is kept or fits.
  Result<StagingBlock> take();
  void give_back(StagingBlock block);

  // Frees what is kept.
  void trim();

 private:
  const std::shared_ptr<PinnedBudget> budget_;
  std::mutex mutex_;
  std::vector<StagingBlock> kept_;
};

}  // namespace trunkline
