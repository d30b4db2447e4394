#include "io/lane/bounce.h"

#include "io/lane/transfer_trace.h"
#include "mem/streaming_copy.h"

namespace trunkline::io {

std::byte* payload(const Transfer& transfer) {
  return transfer.slot.data() + (transfer.piece.offset - transfer.piece.span_offset);
}

void copy_out(const Transfer& transfer) {
  if (!transfer.piece.through_slot || transfer.op != Op::read) return;
  const trace::Span span(kCopyOut, {}, transfer.payload_bytes());
  if (transfer.ranges.size() < 2) {
    streaming_copy(transfer.memory, payload(transfer), transfer.piece.length);
    return;
  }
  // In the file as the caller sees it: the ranges lie in one run of the member.
  const std::uint64_t start = transfer.ranges.front().offset;
  for (const RangeList::Item& item : transfer.ranges)
    streaming_copy(item.memory, payload(transfer) + (item.offset - start), item.length);
}

void copy_in(const Transfer& transfer) {
  if (!transfer.piece.through_slot || transfer.op != Op::write) return;
  const trace::Span span(kCopyIn, {}, transfer.piece.length);
  streaming_copy(payload(transfer), transfer.memory, transfer.piece.length);
}

void use_page_cache(Transfer& transfer) {
  transfer.piece.path = IoPath::buffered;
  transfer.piece.through_slot = false;
  transfer.piece.span_offset = transfer.piece.offset;
  transfer.piece.span_length = transfer.piece.length;
}

}  // namespace trunkline::io
