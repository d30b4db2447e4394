// Ranks that meet before each step by a collective operation, also on several machines.
//
// The clocks of machines differ, so no time is compared with one of another rank. Protocol, for each step:
//  1. All ranks compute for the same time, so the end of the step before is the same moment on all of them.
//     Each contributes by how much it is late: from that end until its batch was ready, 0 if it was in time.
//  2. The collective returns the largest of these.
//  3. Each starts that long after the end of its step before, on its own clock, but a late step no later than
//     when it sees that all have arrived. So ranks that have drifted apart come together again.
// Without a step before, a rank starts when it sees that all have arrived.
#pragma once

#include <cstdint>
#include <optional>

#include "trunkline/error.h"
#include "workload/clock.h"
#include "workload/step_barrier.h"

namespace trunkline::workload {

// A nonblocking reduction over all ranks, one at a time. All ranks begin the same ones in the same order.
class MaxReduction {
 public:
  virtual ~MaxReduction() = default;
  virtual Result<void> begin(std::int64_t value) = 0;
  // The largest value of all ranks; nullopt until all have contributed.
  virtual Result<std::optional<std::int64_t>> poll() = 0;
};

class CollectiveBarrier final : public StepBarrier {
 public:
  CollectiveBarrier(MaxReduction& reduction, Clock& clock) : reduction_(reduction), clock_(clock) {}

  Result<void> arrive(std::uint64_t step, std::int64_t ready, std::optional<std::int64_t> end) override;
  Result<std::optional<std::int64_t>> wait(std::uint64_t step, std::int64_t deadline) override;

 private:
  MaxReduction& reduction_;
  Clock& clock_;
  std::int64_t arrived_ = 0;
  std::optional<std::int64_t> end_;
};

}  // namespace trunkline::workload
