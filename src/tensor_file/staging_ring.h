// The staging blocks of one save or load: a limited number, taken from the engine's pool as needed and
// returned at the end.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/device.h"
#include "mem/staging_pool.h"

namespace trunkline::tensor_file {

// Guarded by its owner's lock, except block() and pin().
class StagingRing {
 public:
  using Index = std::size_t;

  StagingRing(std::shared_ptr<StagingPool> pool, std::size_t most) : pool_(std::move(pool)), most_(most) {
    blocks_.reserve(most);  // so that blocks stay in place while others grow the ring
  }
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;
  ~StagingRing() {
    for (StagingBlock& block : blocks_) pool_->give_back(std::move(block));
  }

  std::optional<Index> try_take() {
    if (free_.empty()) return std::nullopt;
    const Index index = free_.back();
    free_.pop_back();
    return index;
  }
  bool has_free() const { return !free_.empty(); }
  void give_back(Index index) { free_.push_back(index); }

  // Growing takes long, so the owner's lock is not held meanwhile. Where no memory is available, the existing
  // blocks must do; it is an error when those are fewer than `least`.
  bool may_grow() const { return blocks_.size() + growing_ < most_; }
  Status grow(std::unique_lock<std::mutex>& lock, std::size_t least) {
    ++growing_;
    lock.unlock();
    auto block = pool_->take();
    lock.lock();
    --growing_;
    if (!block) {
      most_ = blocks_.size() + growing_;
      if (most_ < least) return std::unexpected(block.error());
      return {};
    }
    blocks_.push_back(std::move(*block));
    free_.push_back(blocks_.size() - 1);
    return {};
  }

  std::byte* block(Index index) const { return blocks_[index].memory.data(); }

  // Registers a block with a device, by the thread that has taken it. A block that cannot be pinned works
  // too, only slower.
  void pin(Index index, Device& device) {
    StagingBlock& block = blocks_[index];
    if (block.pin != nullptr) return;
    if (auto pinned = device.pin({block.memory.data(), block.memory.size()})) block.pin = std::move(*pinned);
  }
  std::size_t size() const { return blocks_.size(); }

 private:
  const std::shared_ptr<StagingPool> pool_;
  std::size_t most_;
  std::size_t growing_ = 0;
  std::vector<StagingBlock> blocks_;
  std::vector<Index> free_;
};

}  // namespace trunkline::tensor_file
