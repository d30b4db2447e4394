// How a request is cut into transfers. The only place that knows about alignment; pure functions.
#pragma once

#include <cstdint>

#include "trunkline/fault.h"

namespace trunkline::io {

// The I/O path of a piece: EngineStats counts payload bytes under the same names.
enum class IoPath {
  direct,    // O_DIRECT, to or from the caller's memory
  bounced,   // O_DIRECT, through a slot of the lane
  buffered,  // through the page cache, to or from the caller's memory, or through a slot for device memory
  gds,       // between the file and device memory, by the device
};

struct PlanLimits {
  bool direct = false;                 // the file supports direct I/O
  std::uint64_t memory_alignment = 1;  // bytes
  std::uint64_t offset_alignment = 1;  // bytes; divides block_bytes
  // The limit for direct pieces; others are limited to its slot_bytes(), except for small buffered edges of
  // writes.
  std::uint64_t block_bytes = 4ULL << 20;
  // False: the memory is a device's. No piece exceeds a slot then, and all but gds pieces go through one.
  bool host_memory = true;
  bool gpu_direct = false;  // the device reads and writes the file directly
};

// The limit for pieces whose bytes are copied. Large pieces save commands and wake-ups where the device moves
// the bytes; a copy should stay in the caches, overlap the next one, and not need much memory.
inline constexpr std::uint64_t kMaxSlotBytes = 1ULL << 20;
constexpr std::uint64_t slot_bytes(std::uint64_t block_bytes) {
  return block_bytes < kMaxSlotBytes ? block_bytes : kMaxSlotBytes;
}

struct Piece {
  IoPath path = IoPath::buffered;
  std::uint64_t offset = 0;  // payload, in the file
  std::uint64_t length = 0;
  // The bytes that are moved: the payload, rounded out to the alignment for bounced reads.
  std::uint64_t span_offset = 0;
  std::uint64_t span_length = 0;
  bool through_slot = false;  // copied by the processor or a device; always so when bounced
};

// Direct writes begin and end at multiples of this, even if the device requires less: an edge that goes
// through the page cache must not share a page with bytes that bypass it, or write-back could put old bytes
// over new ones.
inline constexpr std::uint64_t kWriteGranularity = 4096;

// An unaligned read of at most this size is one bounced transfer: copying it costs less than a separate
// command for the aligned part.
inline constexpr std::uint64_t kWholeBounceBytes = 128 * 1024;

// The first piece of a request for `length` > 0 bytes at `offset` of a file, whose memory starts at
// `address`. Repeated calls for the remainder cut the request up completely, in order.
Piece next_piece(Op op, const PlanLimits& limits, std::uintptr_t address, std::uint64_t offset,
                 std::uint64_t length);

// The remainder of a gds piece of which `moved` bytes, a multiple of its alignment, have been moved: it goes
// through a slot, like other device memory.
Piece rest_through_slot(const Piece& piece, std::uint64_t moved);

}  // namespace trunkline::io
