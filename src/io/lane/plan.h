// How a request becomes transfers. The only place that knows about alignment; pure functions.
#pragma once

#include <cstdint>

#include "trunkline/fault.h"

namespace trunkline::io {

// The I/O path of a piece: EngineStats counts payload bytes under the same names.
enum class IoPath {
  direct,    // O_DIRECT, to or from the caller's memory
  bounced,   // O_DIRECT, through a slot of the lane
  buffered,  // through the page cache, to or from the caller's memory, or through a slot for a device's
  gds,       // between the file and a device's memory, by the device
};

struct PlanLimits {
  bool direct = false;                 // the file takes direct I/O
  std::uint64_t memory_alignment = 1;  // bytes
  std::uint64_t offset_alignment = 1;  // bytes; divides block_bytes
  // A direct piece is at most this, any other at most slot_bytes() of it, but for small buffered edges of
  // writes.
  std::uint64_t block_bytes = 4ULL << 20;
  bool host_memory =
      true;  // else a device's: no piece is larger than a slot, and those not gds go through one
  bool gpu_direct = false;  // the device reads and writes the file itself
};

// A piece whose bytes are copied on the way. Large pieces spare commands and wake-ups where the device moves
// the bytes; a copy should stay in the caches, overlap the next one, and not need much memory.
inline constexpr std::uint64_t kMostSlotBytes = 1ULL << 20;
constexpr std::uint64_t slot_bytes(std::uint64_t block_bytes) {
  return block_bytes < kMostSlotBytes ? block_bytes : kMostSlotBytes;
}

struct Piece {
  IoPath path = IoPath::buffered;
  std::uint64_t offset = 0;  // payload, in the file
  std::uint64_t length = 0;
  std::uint64_t span_offset =
      0;  // what is moved: the payload, rounded out to the alignment for bounced reads
  std::uint64_t span_length = 0;
  bool through_slot = false;  // copied by the processor or a device; always so when bounced
};

// Direct writes begin and end at multiples of this, whatever less the device asks for: an edge that goes
// through the page cache must not share a page with bytes that bypass it, or write-back could put old bytes
// over new ones.
inline constexpr std::uint64_t kWriteGranularity = 4096;

// A read that is not aligned and not larger than this is one bounced transfer: copying it costs less than a
// further command for the part that could do without.
inline constexpr std::uint64_t kWholeBounceBytes = 128 * 1024;

// The first piece of a request for `length` > 0 bytes at `offset` of a file, whose memory starts at
// `address`. Called again for what is left, it cuts the request up completely, in order.
Piece next_piece(Op op, const PlanLimits& limits, std::uintptr_t address, std::uint64_t offset,
                 std::uint64_t length);

// What is left of a gds piece of which `moved` bytes, a multiple of its alignment, have moved: through a
// slot, as other memory of devices.
Piece rest_through_slot(const Piece& piece, std::uint64_t moved);

}  // namespace trunkline::io
