#include "io/lane/transfer_trace.h"

#include <array>
#include <cerrno>
#include <cstddef>

#include "io/file/file_core.h"
#include "io/operation.h"

namespace trunkline::io {
namespace {

using trace::Category;
using trace::Event;
using trace::Kind;

// By Op.
constexpr std::array kTransfers = {Kind{"read", Category::transfer, Kind::Fields::range},
                                   Kind{"write", Category::transfer, Kind::Fields::range},
                                   Kind{"fsync", Category::transfer}};
constexpr std::array kOperations = {Kind{"read", Category::operation, Kind::Fields::range},
                                    Kind{"write", Category::operation, Kind::Fields::range},
                                    Kind{"fsync", Category::operation}};
constexpr Kind kToDevice{"copy to the GPU", Category::copy, Kind::Fields::bytes};
constexpr Kind kFromDevice{"copy from the GPU", Category::copy, Kind::Fields::bytes};
static_assert(static_cast<std::size_t>(Op::read) == 0 && static_cast<std::size_t>(Op::write) == 1 &&
              static_cast<std::size_t>(Op::sync) == 2);

trace::IoPath path_of(const Transfer& transfer) {
  if (transfer.op == Op::sync) return trace::IoPath::none;
  switch (transfer.effective_path()) {
    case IoPath::direct:
      return trace::IoPath::direct;
    case IoPath::bounced:
      return trace::IoPath::bounced;
    case IoPath::buffered:
      return trace::IoPath::buffered;
    case IoPath::gds:
      return trace::IoPath::gds;
  }
  return trace::IoPath::none;
}

Event event_of(const Transfer& transfer, std::uint64_t now) {
  return {.kind = &kTransfers.at(static_cast<std::size_t>(transfer.op)),
          .start_ns = transfer.submitted_ns,
          .end_ns = now,
          .io_path = path_of(transfer),
          .text = transfer.member->trace_text.of(transfer.member->path),
          .offset = transfer.piece.offset};
}

}  // namespace

void trace_command(const Transfer& transfer, const Outcome& outcome, std::int64_t result, std::uint64_t now) {
  Event event = event_of(transfer, now);
  if (outcome.step == Outcome::Step::finished) event.bytes = transfer.piece.length;
  event.result = result;
  trace::record(event);
}

void trace_gds(const Transfer& transfer, std::uint64_t bytes, std::int64_t result) {
  Event event = event_of(transfer, trace::now());
  event.bytes = bytes;
  event.result = result;
  trace::record(event);
}

void trace_copy(const Transfer& transfer, std::uint64_t start_ns) {
  if (start_ns == 0) return;
  trace::record({.kind = transfer.op == Op::read ? &kToDevice : &kFromDevice,
                 .start_ns = start_ns,
                 .end_ns = trace::now(),
                 .text = transfer.member->trace_text.of(transfer.member->path),
                 .device = trace::intern(transfer.operation->memory().device->name()),
                 .bytes = transfer.piece.length});
}

trace::Event operation_event(Op op, std::uint64_t start_ns, trace::ThreadNumber caller) {
  return {.kind = &kOperations.at(static_cast<std::size_t>(op)),
          .start_ns = start_ns,
          .end_ns = trace::now(),
          .caller = caller};
}

}  // namespace trunkline::io
