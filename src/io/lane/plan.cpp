#include "io/lane/plan.h"

#include <algorithm>
#include <optional>

#include "base/rounding.h"

namespace trunkline::io {
namespace {

Piece exact(IoPath path, std::uint64_t offset, std::uint64_t end) {
  return {path, offset, end - offset, offset, end - offset, path == IoPath::bounced};
}

// Pieces end at multiples of their unit in the file, so that all but the first also start at one.
std::uint64_t unit_end(std::uint64_t unit, std::uint64_t offset, std::uint64_t end) {
  return std::min(end, round_down(offset, unit) + unit);
}

std::uint64_t slot_end(const PlanLimits& limits, std::uint64_t offset, std::uint64_t end) {
  return unit_end(slot_bytes(limits.block_bytes), offset, end);
}

// Through the page cache.
Piece buffered(const PlanLimits& limits, std::uint64_t offset, std::uint64_t end) {
  if (limits.host_memory) return exact(IoPath::buffered, offset, end);
  Piece piece = exact(IoPath::buffered, offset, slot_end(limits, offset, end));
  piece.through_slot = true;
  return piece;
}

Piece bounced_read(const PlanLimits& limits, std::uint64_t offset, std::uint64_t end) {
  const std::uint64_t span_offset = round_down(offset, limits.offset_alignment);
  const std::uint64_t span_end = round_up(end, limits.offset_alignment);
  return {IoPath::bounced, offset, end - offset, span_offset, span_end - span_offset, true};
}

Piece next_read(const PlanLimits& limits, std::uintptr_t address, std::uint64_t offset, std::uint64_t end) {
  const std::uint64_t first = round_up(offset, limits.offset_alignment);
  const std::uint64_t last = round_down(end, limits.offset_alignment);
  const bool is_aligned_memory =
      limits.host_memory && (address + (first - offset)) % limits.memory_alignment == 0;
  const bool aligned = first == offset && last == end;
  const bool small = end - offset <= kWholeBounceBytes;
  if (!is_aligned_memory || first >= last || (small && !aligned))
    return bounced_read(limits, offset, slot_end(limits, offset, end));
  if (first != offset) return bounced_read(limits, offset, first);
  return exact(IoPath::direct, offset, unit_end(limits.block_bytes, offset, last));
}

Piece next_write(const PlanLimits& limits, std::uintptr_t address, std::uint64_t offset, std::uint64_t end) {
  const std::uint64_t unit = std::max(limits.offset_alignment, kWriteGranularity);
  const std::uint64_t first = round_up(offset, unit);
  const std::uint64_t last = round_down(end, unit);
  if (first >= last) return buffered(limits, offset, end);  // less than one unit, or an edge on either side
  if (first != offset) return buffered(limits, offset, first);
  const bool is_aligned_memory = limits.host_memory && address % limits.memory_alignment == 0;
  if (!is_aligned_memory) return exact(IoPath::bounced, offset, slot_end(limits, offset, last));
  return exact(IoPath::direct, offset, unit_end(limits.block_bytes, offset, last));
}

// A device that reads and writes files requires aligned addresses too.
constexpr std::uint64_t kGdsAlignment = 4096;

// The part of a request that the device moves directly, or the piece before that part; nullopt where there is
// no such part.
std::optional<Piece> next_gds(Op op, const PlanLimits& limits, std::uintptr_t address, std::uint64_t offset,
                              std::uint64_t end) {
  const std::uint64_t unit = std::max(limits.offset_alignment, kGdsAlignment);
  const std::uint64_t first = round_up(offset, unit);
  const std::uint64_t last = round_down(end, unit);
  if (first >= last || (address + (first - offset)) % kGdsAlignment != 0) return std::nullopt;
  if (first == offset) return exact(IoPath::gds, offset, slot_end(limits, offset, last));
  return op == Op::read ? bounced_read(limits, offset, first) : buffered(limits, offset, first);
}

}  // namespace

Piece rest_through_slot(const Piece& piece, std::uint64_t moved) {
  return exact(IoPath::bounced, piece.offset + moved, piece.offset + piece.length);
}

Piece next_piece(Op op, const PlanLimits& limits, std::uintptr_t address, std::uint64_t offset,
                 std::uint64_t length) {
  const std::uint64_t end = offset + length;
  if (!limits.direct) return buffered(limits, offset, slot_end(limits, offset, end));
  if (!limits.host_memory && limits.gpu_direct) {
    if (const auto piece = next_gds(op, limits, address, offset, end)) return *piece;
  }
  return op == Op::read ? next_read(limits, address, offset, end) : next_write(limits, address, offset, end);
}

}  // namespace trunkline::io
