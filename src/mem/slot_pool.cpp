#include "mem/slot_pool.h"

namespace trunkline {

std::unique_ptr<SlotPool> SlotPool::allocate(std::uint64_t slot_bytes, std::uint32_t slots,
                                             const std::shared_ptr<PinnedBudget>& budget) {
  auto pool = std::make_unique<SlotPool>();
  pool->slot_bytes_ = slot_bytes;
  for (std::uint32_t wanted = slots; wanted > 0; wanted /= 2) {
    auto arena = Buffer::allocate(slot_bytes * wanted, budget);
    if (!arena) continue;
    pool->arena_ = std::move(*arena);
    pool->slots_ = wanted;
    break;
  }
  pool->free_.reserve(pool->slots_);
  for (std::uint32_t index = pool->slots_; index > 0; --index) pool->free_.push_back(index - 1);
  return pool;
}

SlotPool::Lease SlotPool::try_lease() {
  const std::scoped_lock lock(mutex_);
  if (free_.empty()) return {};
  const std::uint32_t index = free_.back();
  free_.pop_back();
  return {this, index};
}

void SlotPool::give_back(std::uint32_t index) {
  const std::scoped_lock lock(mutex_);
  free_.push_back(index);
}

}  // namespace trunkline
