#include "io/lane/transfer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "io/file/file_core.h"
#include "os/file_pair.h"

namespace trunkline::io {
namespace {

// How often in a row a command may fail with EINTR or EAGAIN: enough for any number of signals, but finite.
constexpr unsigned kMaxAttempts = 1000;

std::string describe(const Transfer& transfer) {
  const auto with_range = [&](std::string_view call) {
    const std::string range =
        transfer.ranges.empty() ? "" : fmt::format(" (range {})", transfer.ranges.front().index);
    return fmt::format("{} {} bytes at {} of {}{}", call, transfer.piece.length, transfer.piece.offset,
                       transfer.member->path, range);
  };
  switch (transfer.op) {
    case Op::read:
      return with_range("read");
    case Op::write:
      return with_range("write");
    case Op::sync:
      return fmt::format("fsync {}", transfer.member->path);
  }
  return {};
}

Outcome failed(Error error) { return {.step = Outcome::Step::failed, .error = std::move(error)}; }

Outcome after_error(Transfer& transfer, int code) {
  const bool direct = transfer.effective_path() != IoPath::buffered && transfer.op != Op::sync;
  if ((code == EINTR || code == EAGAIN) && ++transfer.attempts <= kMaxAttempts)
    return {.step = Outcome::Step::resubmit, .error = {}, .retried = true};
  if (code == EINVAL && direct) {
    // open(2): filesystems may reject O_DIRECT when it is used, not only when the file is opened.
    transfer.through_cache = true;
    return {.step = Outcome::Step::resubmit, .error = {}, .refused_direct = true};
  }
  return failed(system_error(code, describe(transfer), transfer.member->path));
}

Outcome after_no_bytes(const Transfer& transfer) {
  if (transfer.op == Op::write) {
    return failed({.kind = ErrorKind::system,
                   .code = EIO,
                   .message = fmt::format("cannot {}: the kernel wrote nothing and gave no reason; see dmesg",
                                          describe(transfer)),
                   .path = transfer.member->path});
  }
  // The read may have begun past the end.
  const std::uint64_t reached = transfer.piece.span_offset + transfer.moved;
  const auto bytes = os::file_bytes(transfer.member->pair.buffered.get(), transfer.member->path);
  return failed(
      make_error(ErrorKind::end_of_file,
                 fmt::format("cannot {}: the file ends at {}; read less, or check that the file is complete",
                             describe(transfer), bytes ? std::min(*bytes, reached) : reached),
                 transfer.member->path));
}

// Whether the rest of the span may continue to bypass the page cache.
bool rest_is_aligned(const Transfer& transfer) {
  const auto& limits = transfer.member->pair.limits;
  const Command rest = transfer.next_command();
  return rest.offset % limits.offset_alignment == 0 && rest.length % limits.offset_alignment == 0 &&
         reinterpret_cast<std::uintptr_t>(rest.data) % limits.memory_alignment == 0;
}

}  // namespace

Command Transfer::next_command() const {
  Command command;
  command.op = op;
  command.direct = effective_path() != IoPath::buffered && op != Op::sync;
  command.fd = command.direct ? member->pair.direct.get() : member->pair.buffered.get();
  if (op == Op::sync) return command;
  command.data = (piece.through_slot ? slot.data() : memory) + moved;
  command.length = piece.span_length - moved;
  command.offset = piece.span_offset + moved;
  command.registered = piece.through_slot && slot_registered;
  return command;
}

std::uint64_t Transfer::payload_bytes() const {
  if (ranges.size() < 2) return piece.length;
  std::uint64_t bytes = 0;
  for (const RangeList::Item& item : ranges) bytes += item.length;
  return bytes;
}

std::uint64_t Transfer::needed() const {
  return op == Op::read ? piece.offset + piece.length - piece.span_offset : piece.span_length;
}

Outcome advance(Transfer& transfer, std::int64_t result) {
  if (result < 0) return after_error(transfer, static_cast<int>(-result));
  if (transfer.op == Op::sync) return {};
  if (result == 0) return after_no_bytes(transfer);
  const auto bytes = static_cast<std::uint64_t>(result);
  if (bytes > transfer.piece.span_length - transfer.moved) {
    return failed(
        {.kind = ErrorKind::system,
         .code = EIO,
         .message = fmt::format("cannot {}: the kernel reports {} bytes, more than requested; see dmesg",
                                describe(transfer), bytes),
         .path = transfer.member->path});
  }
  transfer.moved += bytes;
  transfer.attempts = 0;
  if (transfer.moved >= transfer.needed()) return {};
  if (transfer.effective_path() != IoPath::buffered && !rest_is_aligned(transfer))
    transfer.through_cache = true;
  return {.step = Outcome::Step::resubmit, .error = {}, .resumed = true};
}

}  // namespace trunkline::io
