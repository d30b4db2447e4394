// Blocks for data on its way between tensors and files. Returned blocks are kept for reuse: the kernel takes
// longer to provide new memory than to copy into it.
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
  std::shared_ptr<const void> pin = {};  // of Device::pin, once a device has used it
};

// Thread-safe. Kept blocks count against the budget, and are freed when the budget runs short (PinnedBudget).
class StagingPool {
 public:
  static constexpr std::uint64_t kBlockBytes = 4ULL << 20;

  explicit StagingPool(std::shared_ptr<PinnedBudget> budget) : budget_(std::move(budget)) {}

  // A block of kBlockBytes with unspecified contents; out_of_budget when none is kept and a new one does not
  // fit.
  Result<StagingBlock> take();
  void give_back(StagingBlock block);

  // Frees all kept blocks.
  void trim();

 private:
  const std::shared_ptr<PinnedBudget> budget_;
  std::mutex mutex_;
  std::vector<StagingBlock> kept_;
};

}  // namespace trunkline
