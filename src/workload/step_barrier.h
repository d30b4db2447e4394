// Where the ranks of a training meet before each step: all start when the batch of the last one is ready.
#pragma once

#include <cstdint>
#include <optional>

#include "trunkline/error.h"

namespace trunkline::workload {

// For one rank, used by one thread.
class StepBarrier {
 public:
  virtual ~StepBarrier() = default;

  // Once for each step, in their order. `ready`: when the batch was. `end`: of the step before; nullopt if
  // there was none since the start or a pause.
  virtual Result<void> arrive(std::uint64_t step, std::int64_t ready, std::optional<std::int64_t> end) = 0;
  // The time at which all ranks start; nullopt if some have not arrived by the deadline. Both are of the
  // loop's clock.
  virtual Result<std::optional<std::int64_t>> wait(std::uint64_t step, std::int64_t deadline) = 0;
};

}  // namespace trunkline::workload
