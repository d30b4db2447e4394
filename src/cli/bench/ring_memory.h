// The memory that benchmark transfers come from and go to.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cli/bench/options.h"
#include "cli/bench/ring_shape.h"
#include "trunkline/buffer.h"
#include "trunkline/engine.h"

namespace trunkline::cli {

struct Unmap {
  std::size_t bytes = 0;
  void operator()(std::byte* data) const;
};

// Slots of one size, each touched already so that no page fault falls into a measurement. Movable.
class RingMemory {
 public:
  static Result<RingMemory> allocate(const Engine& engine, MemoryKind kind, std::uint64_t slots,
                                     std::uint64_t slot_bytes);

  std::span<std::byte> slot(std::uint64_t index) const {
    return {base_ + index * stride_bytes_, static_cast<std::size_t>(slot_bytes_)};
  }

 private:
  Buffer aligned_;
  std::unique_ptr<std::byte, Unmap> ordinary_;
  std::byte* base_ = nullptr;
  std::uint64_t stride_bytes_ = 0;
  std::uint64_t slot_bytes_ = 0;
};

}  // namespace trunkline::cli
