#include "cli/bench/ring_shape.h"

#include <algorithm>

#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kMaxRequestBytes = 64 * kMiB;
// Of a batch of random blocks, at least: the submitting thread wakes up for each batch, and for a few blocks
// of 4 KiB that would cost more than the transfers.
constexpr std::uint64_t kMinBatchBytes = kMiB;

std::uint64_t divide_up(std::uint64_t amount, std::uint64_t by) { return (amount + by - 1) / by; }

}  // namespace

RingShape ring_shape(Order order, std::uint64_t files, const RingLimits& limits) {
  constexpr std::uint64_t kBatches = 4;  // that share the outstanding blocks
  const std::uint64_t outstanding = std::max(2 * limits.in_flight, kBatches);  // blocks, over all files
  // A quarter of the outstanding blocks a batch, or less when there are more than four files; every file has
  // at least two.
  std::uint64_t batch_blocks = std::max<std::uint64_t>(1, outstanding / (kBatches * files));
  RingShape shape;
  if (order == Order::sequential) {
    batch_blocks = std::clamp<std::uint64_t>(kMaxRequestBytes / limits.block_bytes, 1, batch_blocks);
    shape = {.piece_bytes = batch_blocks * limits.block_bytes, .pieces = 1};
  } else {
    const std::uint64_t room = limits.memory_bytes / (limits.block_bytes * kBatches * files);
    batch_blocks = std::max(batch_blocks, std::min(kMinBatchBytes / limits.block_bytes, room));
    shape = {.piece_bytes = limits.block_bytes, .pieces = batch_blocks};
  }
  shape.batches_per_file = std::max<std::uint64_t>(2, divide_up(outstanding, files * batch_blocks));
  const std::uint64_t step_bytes = shape.piece_bytes * shape.pieces * files;
  shape.batches_per_file =
      std::clamp<std::uint64_t>(limits.memory_bytes / step_bytes, 1, shape.batches_per_file);
  return shape;
}

RingShape lap_shape(Order order, std::uint64_t files, std::uint64_t file_bytes, const RingLimits& limits) {
  RingShape shape = ring_shape(order, files, limits);
  const std::uint64_t batch_bytes = shape.piece_bytes * shape.pieces;
  const std::uint64_t whole_file = std::max<std::uint64_t>(1, divide_up(file_bytes, batch_bytes));
  const std::uint64_t room = limits.memory_bytes / (batch_bytes * files);
  shape.batches_per_file = std::min(whole_file, std::max(shape.batches_per_file, room));
  return shape;
}

}  // namespace trunkline::cli
