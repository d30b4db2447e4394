// Equal slots carved from one Buffer: bounce buffers for transfers that cannot go directly to the caller's
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "trunkline/buffer.h"

namespace trunkline {

// Thread-safe. Outlives its leases.
class SlotPool {
 public:
  // Exclusive use of one slot, which is returned to the pool at destruction.
  class Lease {
   public:
    Lease() = default;
    Lease(SlotPool* pool, std::uint32_t index) : pool_(pool), index_(index) {}
    Lease(Lease&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), index_(other.index_) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(index_, other.index_);
      return *this;
    }
    ~Lease() {
      if (pool_ != nullptr) pool_->give_back(index_);
    }
    bool valid() const { return pool_ != nullptr; }
    std::byte* data() const { return pool_->arena_.data() + index_ * pool_->slot_bytes_; }

   private:
    SlotPool* pool_ = nullptr;
    std::uint32_t index_ = 0;
  };

  // As many slots as `budget` has room for, at most `slots`; the pool is empty when there is room for none.
  static std::unique_ptr<SlotPool> allocate(std::uint64_t slot_bytes, std::uint32_t slots,
                                            const std::shared_ptr<PinnedBudget>& budget);

  std::uint32_t slots() const { return slots_; }
  std::span<std::byte> arena() const { return arena_.span(); }

  // An invalid lease when all slots are in use.
  Lease try_lease();

 private:
  void give_back(std::uint32_t index);

  Buffer arena_;
  std::uint64_t slot_bytes_ = 0;
  std::uint32_t slots_ = 0;
  std::mutex mutex_;
  std::vector<std::uint32_t>
      free_;  // last in, first out: the most recently used slot is the warmest in the cache
};

}  // namespace trunkline
