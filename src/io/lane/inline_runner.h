// Runs transfers on the caller's thread, one command after the other. Small blocking operations use this
// instead of a lane.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "io/backends/backend.h"
#include "io/lane/counters.h"
#include "io/lane/cursor.h"
#include "io/lane/transfer.h"
#include "mem/pinned_budget.h"
#include "mem/slot_pool.h"

namespace trunkline::io {

class FaultPlan;  // io/backends/faulty.h

struct InlineOptions {
  std::uint64_t block_bytes;
  std::uint64_t slot_bytes;  // of a bounce slot: one block
  unsigned slots;            // at most, allocated when the first transfer must bounce
  std::shared_ptr<PinnedBudget> budget;
  std::shared_ptr<FaultPlan> faults;  // or null
};

// Thread-safe: each caller moves its own bytes.
class InlineRunner {
 public:
  InlineRunner(InlineOptions options, Counters& counters)
      : options_(std::move(options)), counters_(counters) {}

  // Moves all remaining bytes of the cursor; stops at the first failure.
  Status move_all(Cursor cursor);

 private:
  Status move(Transfer& transfer);
  std::int64_t run(const Command& command);
  SlotPool& slots();

  const InlineOptions options_;
  Counters& counters_;
  std::mutex mutex_;
  std::unique_ptr<SlotPool> slots_;
};

}  // namespace trunkline::io
