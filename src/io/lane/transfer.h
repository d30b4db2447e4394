// One piece of an operation in flight: which command comes next, and what a result means. It does no I/O, so
// that the rules can be tested with tables.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "io/backends/backend.h"
#include "io/lane/plan.h"
#include "io/lane/range_list.h"
#include "mem/slot_pool.h"

namespace trunkline {
class Operation;
}

namespace trunkline::io {

struct Member;  // io/file/file_core.h

struct Transfer {
  std::shared_ptr<Operation> operation;
  Member* member = nullptr;
  Op op = Op::read;
  Piece piece;
  std::byte* memory =
      nullptr;  // of the payload, in the caller's memory; of the first range, if there are several
  // Of an operation with ranges: those that this transfer reads, all or parts of one. Several are read
  // through a slot, with the gaps between them, and lie in one run of the member in the order of their
  // offsets.
  std::span<const RangeList::Item> ranges = {};
  SlotPool::Lease slot;  // held by pieces that go through one
  bool slot_registered = false;

  std::uint64_t moved = 0;     // bytes of the span
  bool through_cache = false;  // the rest of the span goes through the page cache
  unsigned attempts = 0;       // in a row that made no progress
  std::uint64_t submitted_ns = 0;
  std::uint64_t copy_start_ns = 0;  // of a copy to or from a device, for traces

  // The I/O path that the payload takes in the end: the piece's, unless the page cache had to be used
  // instead.
  IoPath effective_path() const { return through_cache ? IoPath::buffered : piece.path; }

  // The command that moves the rest of the span.
  Command next_command() const;

  // Bytes for the caller.
  std::uint64_t payload_bytes() const;

  // Bytes of the span that must be moved: a bounced read needs those up to the payload's end, not the padding
  // after it.
  std::uint64_t needed() const;
};

// What comes after a command.
struct Outcome {
  enum class Step { finished, resubmit, failed };
  Step step = Step::finished;
  Error error;                  // when failed
  bool retried = false;         // interrupted, and submitted again
  bool resumed = false;         // continued after a short result
  bool refused_direct = false;  // direct I/O was rejected, and the page cache is used instead
};

// Applies the result of the last next_command().
Outcome advance(Transfer& transfer, std::int64_t result);

}  // namespace trunkline::io
