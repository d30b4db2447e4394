// Where the ranks of one machine meet before each step, in memory that their processes share.
//
// Protocol, for step k, in slot k % kSlots:
//  1. A rank raises the slot's time to the one at which it could start, then counts itself in.
//  2. The rank that completes the count wakes the others.
//  3. Each starts at the slot's time: the latest of all.
// No rank can be more than one step ahead of another, and times only grow, so a slot needs no reset: the
// count goes on, and the times of earlier steps are below those of later ones.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "trunkline/error.h"
#include "workload/step_barrier.h"

namespace trunkline::workload {

// Zero-initialized memory is a valid one. Shared between processes.
struct BarrierMemory {
  static constexpr std::uint64_t kSlots = 4;
  struct alignas(64) Slot {
    std::atomic<std::int64_t> latest;
    std::atomic<std::uint32_t> arrived;  // of all steps; a futex
  };
  std::array<Slot, kSlots> slots;
  std::atomic<std::uint32_t> aborted;
};

class SharedBarrier final : public StepBarrier {
 public:
  SharedBarrier(BarrierMemory& memory, std::uint32_t ranks) : memory_(memory), ranks_(ranks) {}

  Result<void> arrive(std::uint64_t step, std::int64_t ready, std::optional<std::int64_t> end) override;
  // Times are of CLOCK_MONOTONIC. `cancelled` once a rank has aborted.
  Result<std::optional<std::int64_t>> wait(std::uint64_t step, std::int64_t deadline) override;

  // Ends the waits of all ranks.
  static void abort(BarrierMemory& memory);

 private:
  std::uint32_t complete_count(std::uint64_t step) const;  // of a slot, once all ranks have arrived

  BarrierMemory& memory_;
  const std::uint32_t ranks_;
};

}  // namespace trunkline::workload
