// The memory that a benchmark transfers to and from.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "cli/bench/options.h"
#include "cli/bench/ring_shape.h"
#include "device/blocking_copies.h"
#include "trunkline/buffer.h"
#include "trunkline/engine.h"

namespace trunkline::cli {

struct Unmap {
  std::size_t bytes = 0;
  void operator()(std::byte* data) const;
};

// Slots of one size, all resident already so that no page fault disturbs a measurement. Movable. For use by
// one thread.
class RingMemory {
 public:
  // In the memory of `device`; nullptr: host memory.
  static Result<RingMemory> allocate(const Engine& engine, MemoryKind kind, Device* device,
                                     std::uint64_t slots, std::uint64_t slot_bytes);

  // Over memory that outlives it and holds what is to be written; large enough for all slots.
  static RingMemory over(std::span<std::byte> memory, std::uint64_t slot_bytes);

  // The view that is passed to a transfer.
  MemoryView slot(std::uint64_t index, std::uint64_t bytes) const;

  // The first `bytes` of a slot, in memory that the processor can write; filled() copies them to the slot ...
  std::span<std::byte> begin_filling(std::uint64_t index, std::uint64_t bytes);
  Status filled(std::uint64_t index, std::uint64_t bytes);

  // ... and in memory that the processor can read.
  Result<std::span<const std::byte>> contents(std::uint64_t index, std::uint64_t bytes);

 private:
  std::byte* at(std::uint64_t index) const { return base_ + index * stride_bytes_; }
  Status allocate_on(const Engine& engine, Device& device, std::uint64_t bytes);

  Buffer aligned_;
  std::unique_ptr<std::byte, Unmap> ordinary_;
  Device* device_ = nullptr;
  std::shared_ptr<void> device_memory_;
  std::shared_ptr<const void> registered_;  // with cuFile, where it is available
  std::optional<BlockingCopies> copies_;    // between the device and aligned_, which then holds one slot
  std::byte* base_ = nullptr;
  std::uint64_t stride_bytes_ = 0;
  std::uint64_t slot_bytes_ = 0;
};

}  // namespace trunkline::cli
