// The memory that batches are read into: a fixed number of buffers, each used again once nobody holds the
// batch in it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "trunkline/engine.h"

namespace trunkline::records {

// Thread-safe. Outlives its owner for as long as a lease does.
class BatchMemory : public std::enable_shared_from_this<BatchMemory> {
 public:
  class Slot {
   public:
    // The first `bytes` of the slot, which grows for that. Of the slot's holder alone.
    Result<std::span<std::byte>> reserve(std::uint64_t bytes);

   private:
    friend class BatchMemory;
    Slot(Engine engine, std::optional<unsigned> cuda_ordinal)
        : engine_(std::move(engine)), cuda_ordinal_(cuda_ordinal) {}

    void release_memory();

    Engine engine_;
    std::optional<unsigned> cuda_ordinal_;
    Buffer buffer_;
    std::shared_ptr<const void> registration_;  // with the CUDA driver
  };
  // Gives the slot back when its last copy is dropped, on any thread. In a forked child, nothing happens
  // then: the slot is the parent's.
  using Lease = std::shared_ptr<Slot>;

  // Buffers are registered with a GPU where one is given, so that copies to it are asynchronous.
  static std::shared_ptr<BatchMemory> create(const Engine& engine, unsigned slots,
                                             std::optional<unsigned> cuda_ordinal);

  // Waits for a slot that nobody holds; null after close().
  Lease acquire();
  bool has_free_slot() const;

  // Releases all memory: that of slots that are held, as soon as they are not.
  void close();

 private:
  BatchMemory() = default;
  void give_back(Slot* slot);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> free_;
  bool closed_ = false;
};

}  // namespace trunkline::records
