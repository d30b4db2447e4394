#include "mem/staging_pool.h"

#include <utility>

#include "mem/fresh_pages.h"

namespace trunkline {

Result<StagingBlock> StagingPool::take() {
  {
    const std::scoped_lock lock(mutex_);
    if (!kept_.empty()) {
      StagingBlock block = std::move(kept_.back());
      kept_.pop_back();
      return block;
    }
  }
  auto block = Buffer::allocate_pageable(kBlockBytes, budget_);
  if (!block) return std::unexpected(block.error());
  FreshMapping mapping{.data = block->data(), .bytes = block->size()};
  populate_pages(mapping.data, mapping.bytes, mapping);
  return StagingBlock{.memory = std::move(*block)};
}

void StagingPool::give_back(StagingBlock block) {
  const std::scoped_lock lock(mutex_);
  kept_.push_back(std::move(block));
}

void StagingPool::trim() {
  std::vector<StagingBlock> freed;  // destroyed outside the lock: unmapping takes time
  const std::scoped_lock lock(mutex_);
  freed.swap(kept_);
}

}  // namespace trunkline
