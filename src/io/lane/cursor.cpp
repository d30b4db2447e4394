#include "io/lane/cursor.h"

#include "device/device.h"
#include "io/file/file_core.h"
#include "io/lane/plan.h"

namespace trunkline::io {

bool Cursor::exhausted() const { return issued == (op == Op::sync ? file->layout.members : memory.bytes); }

bool Cursor::next(std::uint64_t block_bytes, Transfer& transfer) {
  if (exhausted()) return false;
  transfer.op = op;
  if (op == Op::sync) {
    transfer.member = &file->members[issued++];
    return true;
  }
  const Run run = file->layout.locate(offset + issued, memory.bytes - issued);
  Member& member = file->members[run.member];
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
  transfer.member = &member;
  transfer.memory = memory.data + issued;
  transfer.piece =
      next_piece(op, plan, reinterpret_cast<std::uintptr_t>(transfer.memory), run.offset, run.length);
  issued += transfer.piece.length;
  return true;
}

}  // namespace trunkline::io
