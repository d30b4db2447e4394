#include "io/lane/inline_runner.h"

#include "io/backends/faulty.h"
#include "io/backends/run_command.h"
#include "io/lane/bounce.h"
#include "io/lane/command_result.h"

namespace trunkline::io {

Status InlineRunner::move_all(Cursor cursor) {
  Transfer transfer;
  while (cursor.next(options_.block_bytes, transfer)) {
    if (auto moved = move(transfer); !moved) return moved;
    transfer = {};
  }
  return {};
}

Status InlineRunner::move(Transfer& transfer) {
  if (transfer.piece.through_slot && transfer.op != Op::sync) {
    transfer.slot = slots().try_lease();
    if (transfer.slot.valid())
      copy_in(transfer);
    else
      use_page_cache(transfer);
  }
  while (true) {
    transfer.submitted_ns = now_ns();
    const std::int64_t result = run(transfer.next_command());
    Outcome outcome = handle_result(transfer, result, now_ns(), counters_);
    if (outcome.step == Outcome::Step::failed) return std::unexpected(std::move(outcome.error));
    if (outcome.step == Outcome::Step::finished) break;
  }
  copy_out(transfer);
  if (transfer.op != Op::sync) counters_.count_payload(transfer.effective_path(), transfer.piece.length);
  return {};
}

std::int64_t InlineRunner::run(const Command& command) {
  if (options_.faults == nullptr) return run_command(command);
  const Fault fault = options_.faults->next(command);
  const auto changed = under_fault(command, fault);
  const std::int64_t result = changed ? run_command(*changed) : 0;
  if (fault.hold) options_.faults->wait_released();
  return result_under_fault(command, fault, result);
}

SlotPool& InlineRunner::slots() {
  const std::scoped_lock lock(mutex_);
  if (slots_ == nullptr) slots_ = SlotPool::allocate(options_.slot_bytes, options_.slots, options_.budget);
  return *slots_;
}

}  // namespace trunkline::io
