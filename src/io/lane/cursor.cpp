#include "io/lane/cursor.h"

#include <algorithm>

#include "base/rounding.h"
#include "device/device.h"
#include "io/file/file_core.h"
#include "io/lane/plan.h"

namespace trunkline::io {
namespace {

// Ranges that are further apart are not read together: what lies between them would take the device longer
// than another command.
constexpr std::uint64_t kMaxGapBytes = 4096;
// Ranges of one transfer, at most, however small they are.
constexpr std::size_t kMaxGroup = 256;

}  // namespace

bool Cursor::exhausted() const {
  if (ranges != nullptr) return next_range == ranges->items.size();
  return issued == (op == Op::sync ? file->layout.members : memory.bytes);
}

bool Cursor::next(std::uint64_t block_bytes, Transfer& transfer) {
  if (exhausted()) return false;
  if (ranges != nullptr) return next_of_ranges(block_bytes, transfer);
  if (op == Op::sync) {
    transfer.op = op;
    transfer.member = &file->members[issued++];
    return true;
  }
  plan(*file, memory.data + issued, offset + issued, memory.bytes - issued, block_bytes, transfer);
  issued += transfer.piece.length;
  return true;
}

void Cursor::plan(FileCore& of_file, std::byte* data, std::uint64_t from, std::uint64_t length,
                  std::uint64_t block_bytes, Transfer& transfer) const {
  const Run run = of_file.layout.locate(from, length);
  Member& member = of_file.members[run.member];
  const os::DirectLimits& limits = member.pair.limits;
  // Unless a slot is a multiple of the alignment, a piece rounded out to it may not fit, and a block's end
  // may not be aligned.
  const bool fits =
      slot_bytes(block_bytes) % limits.offset_alignment == 0 && block_bytes % limits.offset_alignment == 0;
  const PlanLimits plan{
      .direct = limits.usable && fits && !member.direct_refused.load(std::memory_order_relaxed),
      .memory_alignment = limits.memory_alignment,
      .offset_alignment = limits.offset_alignment,
      .block_bytes = block_bytes,
      .host_memory = is_host(memory),
      .gpu_direct = gpu_direct && (gds_required || !member.gds_refused.load(std::memory_order_relaxed))};
  transfer.op = op;
  transfer.member = &member;
  transfer.memory = data;
  transfer.piece =
      next_piece(op, plan, reinterpret_cast<std::uintptr_t>(transfer.memory), run.offset, run.length);
}

bool Cursor::next_of_ranges(std::uint64_t block_bytes, Transfer& transfer) {
  const RangeList::Item& item = ranges->items[next_range];
  plan(*item.file, item.memory + issued, item.offset + issued, item.length - issued, block_bytes, transfer);
  transfer.ranges = {&item, 1};
  if (issued + transfer.piece.length < item.length) {
    issued += transfer.piece.length;
    return true;
  }
  const bool whole = issued == 0 && transfer.piece.path == IoPath::bounced && is_host(memory);
  next_range += whole ? extend_group(block_bytes, transfer) : 1;
  issued = 0;
  return true;
}

// Adds the ranges to a bounced transfer that come next in the file, are bounced whole, too, and fit into its
// slot. Returns how many the transfer has then.
std::size_t Cursor::extend_group(std::uint64_t block_bytes, Transfer& transfer) const {
  const std::span<const RangeList::Item> items = std::span(ranges->items).subspan(next_range);
  const std::uint64_t alignment = transfer.member->pair.limits.offset_alignment;
  Piece& piece = transfer.piece;
  std::size_t count = 1;
  for (; count < std::min(items.size(), kMaxGroup); ++count) {
    const RangeList::Item& item = items[count];
    if (item.file != items.front().file) break;
    // Where it is if it is in the same run: what does not fit is planned only once, for its own transfer.
    const std::uint64_t from = piece.offset + (item.offset - items.front().offset);
    const std::uint64_t end = piece.offset + piece.length;
    const std::uint64_t new_end = std::max(end, from + item.length);
    const std::uint64_t span_end = round_up(new_end, alignment);
    if (from > end + kMaxGapBytes || span_end - piece.span_offset > slot_bytes(block_bytes)) break;
    Transfer other;
    plan(*item.file, item.memory, item.offset, item.length, block_bytes, other);
    if (other.member != transfer.member || other.piece.offset != from ||
        other.piece.path != IoPath::bounced || other.piece.length != item.length)
      break;
    piece.length = new_end - piece.offset;
    piece.span_length = span_end - piece.span_offset;
  }
  transfer.ranges = items.first(count);
  return count;
}

void Cursor::plan_alone(const RangeList::Item& item, std::uint64_t done, std::uint64_t block_bytes,
                        Transfer& transfer) const {
  plan(*item.file, item.memory + done, item.offset + done, item.length - done, block_bytes, transfer);
  transfer.ranges = {&item, 1};
}

}  // namespace trunkline::io
