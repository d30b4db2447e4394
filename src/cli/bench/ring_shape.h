// How many transfers are kept outstanding, so that the engine's queue never runs empty.
#pragma once

#include <cstdint>

#include "cli/bench/schedule.h"

namespace trunkline::cli {

struct RingLimits {
  std::uint64_t block_bytes = 0;
  std::uint64_t in_flight = 0;     // transfers that the engine can have in flight: lanes * queue depth
  std::uint64_t memory_bytes = 0;  // limit on the ring's memory
};

// Every file has `batches_per_file` batches of `pieces` requests of `piece_bytes` in the engine; a batch is
// replaced when all of it has completed.
struct RingShape {
  std::uint64_t piece_bytes = 0;
  std::uint64_t pieces = 0;
  std::uint64_t batches_per_file = 0;

  std::uint64_t bytes(std::uint64_t files) const { return piece_bytes * pieces * batches_per_file * files; }
};

// Sequential: one large request a batch, which the engine splits into blocks. Random: many requests of one
// block. Either way twice what the engine has in flight, over all files, so that the queue is still filled
// after a batch completes while the next is submitted; no more, so that the memory in use stays small, like
// fio's. Only batches of small random blocks are larger, for fewer of them a second.
RingShape ring_shape(Order order, std::uint64_t files, const RingLimits& limits);

// For transfers whose content is generated before the clock starts and checked after it stopped: as much as
// fits the memory, but no more than `file_bytes` of each file.
RingShape lap_shape(Order order, std::uint64_t files, std::uint64_t file_bytes, const RingLimits& limits);

}  // namespace trunkline::cli
