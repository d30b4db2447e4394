// Batches from an imagined device of a known speed: nothing is read, but time passes as if it were.
//
// The device reads ahead into `slots` buffers, a batch after the other. It begins batch n when it has
// delivered batch n - 1, and the buffer of batch n - slots was released.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "workload/batch_source.h"
#include "workload/clock.h"

namespace trunkline::workload {

struct PacedDevice {
  double bytes_per_ns = 1;  // the same number as GB/s
  double unit_bytes = 0;    // of a unit, on average
  std::size_t slots = 2;
};

// For one thread at a time, which also releases the memory of batches. The clock must outlive the source.
class PacedSource final : public BatchSource {
 public:
  PacedSource(const records::OrderOptions& order, PacedDevice device, Clock& clock);
  Result<SourceBatch> next(std::chrono::nanoseconds timeout) override;

 private:
  struct Slots;
  struct Delivery {
    SourceBatch batch;
    std::int64_t time = 0;
  };

  std::optional<Delivery> begin();

  NullSource batches_;
  const PacedDevice device_;
  Clock& clock_;
  const std::shared_ptr<Slots> slots_;
  std::optional<Delivery> delivery_;  // that has begun
  std::int64_t delivered_;            // when the last one had arrived
};

}  // namespace trunkline::workload
