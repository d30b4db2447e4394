#include "io/lane/lane.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/log.h"
#include "base/trace.h"
#include "base/waits.h"
#include "device/device.h"
#include "io/backends/faulty.h"
#include "io/file/file_core.h"
#include "io/gpu/gds_policy.h"
#include "io/lane/bounce.h"
#include "io/lane/command_result.h"
#include "io/lane/transfer_trace.h"
#include "os/signals_blocked.h"
#include "trunkline/units.h"

namespace trunkline::io {
namespace {

// A busy lane reaps this part of its depth at a time: an eighth. The rest keeps the disk busy.
constexpr unsigned kReapDivisor = 8;

std::uint64_t whole_gds_blocks(std::uint64_t bytes) { return bytes / kGdsAlignment * kGdsAlignment; }

}  // namespace

Lane::~Lane() { join(); }

Status Lane::start() {
  std::promise<Status> started;
  auto status = started.get_future();
  {
    const os::SignalsBlocked blocked;
    try {
      thread_ = std::thread([this, &started] { run(started); });
    } catch (const std::system_error& error) {
      return std::unexpected(system_error(error.code().value(), "start a lane's thread"));
    }
  }
  Status result = status.get();
  if (!result) thread_.join();
  return result;
}

bool Lane::wake_if_wants_work() {
  if (!wants_work_.exchange(false)) return false;
  backend_->wake();
  return true;
}

void Lane::join() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  backend_->wake();
  thread_.join();
}

bool Lane::join_until(std::chrono::steady_clock::time_point deadline) {
  if (!thread_.joinable()) return true;
  stopping_.store(true);
  backend_->wake();
  if (has_ended_.wait_until(deadline) != std::future_status::ready) return false;
  thread_.join();
  return true;
}

void Lane::run(std::promise<Status>& started) {
  pthread_setname_np(pthread_self(), fmt::format("trunkline-{}", options_.index).c_str());
  trace::name_this_thread(fmt::format("lane {} ({})", options_.index, to_string(options_.backend)),
                          trace::Role::lane);
  auto backend = make_backend(options_.backend, options_.depth);
  if (!backend) {
    started.set_value(std::unexpected(backend.error()));
    return;
  }
  features_ = (*backend)->features();
  backend_ = options_.faults ? options_.faults->decorate(std::move(*backend)) : std::move(*backend);
  transfers_.resize(options_.depth);
  for (std::uint32_t tag = options_.depth; tag > 0; --tag) free_tags_.push_back(tag - 1);
  started.set_value({});

  std::vector<Completion> completions;
  while (true) {
    submit_ready();
    const bool idle = free_tags_.size() == options_.depth;
    if (idle && stopping_.load() && queue_.empty()) break;
    devices_.send();
    if (!free_tags_.empty() && !waiting_for_slot_) {
      wants_work_.store(true);
      // Work that came before the flag was set woke nobody.
      if (!queue_.empty()) {
        wants_work_.store(false);
        continue;
      }
    }
    completions.clear();
    backend_->reap(completions, min_completions());
    wants_work_.store(false);
    phase_ns_ = now_ns();
    for (const Completion& completion : completions) finish(completion);
    finish_device_transfers();
  }
  ended_.set_value();
}

// How many completions to wait for: one while the lane has room. If it is full and more work is queued, the
// queued work waits anyway, and reaping several at a time saves most of the wake-ups.
unsigned Lane::min_completions() const {
  const bool saturated = free_tags_.empty() && !queue_.empty() && devices_.under_way() == 0;
  return saturated ? std::max(1U, options_.depth / kReapDivisor) : 1;
}

Transfer Lane::next_transfer() {
  if (waiting_for_slot_) {
    Transfer transfer = std::move(*waiting_for_slot_);
    waiting_for_slot_.reset();
    return transfer;
  }
  if (retry_queue_.empty()) return queue_.take();
  Transfer transfer = std::move(retry_queue_.front());
  retry_queue_.pop_front();
  return transfer;
}

void Lane::submit_ready() {
  phase_ns_ = now_ns();
  while (!free_tags_.empty()) {
    Transfer transfer = next_transfer();
    if (transfer.operation == nullptr) return;
    auto ready = prepare(transfer);
    if (transfer.slot.valid()) phase_ns_ = now_ns();  // it may have been filled, which takes long
    if (slot_wait_start_ns_ != 0 && (!ready || *ready)) end_slot_wait(transfer);
    if (!ready) {
      transfer.operation->fail(std::move(ready.error()));
      transfer.operation->release_ref();
    } else if (*ready && transfer.ranges.size() > 1 && !transfer.slot.valid()) {
      read_one_by_one(std::move(transfer));
    } else if (!*ready) {
      if (slot_wait_start_ns_ == 0) slot_wait_start_ns_ = trace::now();
      waiting_for_slot_ = std::move(transfer);
      return;
    } else {
      submit(std::move(transfer));
    }
  }
}

void Lane::end_slot_wait(const Transfer& transfer) {
  const std::uint64_t now = trace::now();
  const std::uint64_t began = std::exchange(slot_wait_start_ns_, 0);
  trace::record({.kind = &kSlotWait, .start_ns = began, .end_ns = now, .bytes = transfer.piece.length});
  if (now - began < kLongWaitNs) return;
  log::info(log::Component::engine, "lane {}: waited {:.1f} s for one of {} bounce slots", options_.index,
            static_cast<double>(now - began) / 1e9, slots().slots());
}

// Gives a transfer its slot, and fills that for a write from host memory. False: no slot is free now.
Result<bool> Lane::prepare(Transfer& transfer) {
  if (transfer.op == Op::sync) return true;
  const MemoryView& memory = transfer.operation->memory();
  if (transfer.piece.path == IoPath::gds) {
    if (auto ready = devices_.prepare_gds(*memory.device); !ready) return std::unexpected(ready.error());
    return true;
  }
  if (!transfer.piece.through_slot) return true;
  const bool on_host = is_host(memory);
  // The budget may have room by now, and device memory cannot do without a slot.
  if (!on_host && slots_ != nullptr && slots_->slots() == 0) slots_.reset();
  if (slots().slots() == 0) {
    if (!on_host) {
      return std::unexpected(make_error(
          ErrorKind::out_of_budget,
          fmt::format(
              "cannot copy through pinned memory to or from {}: {} of the engine's budget of {} are in "
              "use, which leaves no room for a bounce buffer; free buffers, or create the Engine with "
              "a larger pinned_budget_bytes",
              memory.device->name(), format_size(options_.budget->used_bytes()),
              format_size(options_.budget->limit_bytes()))));
    }
    use_page_cache(transfer);
    return true;
  }
  if (!on_host) {
    auto ready = devices_.prepare_copy(*memory.device, slots().arena());
    if (!ready) return std::unexpected(ready.error());
  }
  transfer.slot = slots().try_lease();
  if (!transfer.slot.valid()) return false;
  transfer.slot_registered = registered_;
  if (on_host) copy_in(transfer);
  return true;
}

void Lane::finish_device_transfers() {
  if (devices_.under_way() == 0) return;
  for (CopyQueue::Completion& copy : devices_.take_copies()) finish_copy(copy);
  for (GdsQueue::Completion& each : devices_.take_gds()) finish_gds(each);
}

void Lane::finish_copy(CopyQueue::Completion& completion) {
  Transfer& transfer = transfers_[completion.tag];
  if (trace::is_on()) trace_copy(transfer, transfer.copy_start_ns);
  if (completion.error) {
    transfer.operation->fail(std::move(*completion.error));
    release(completion.tag);
  } else if (transfer.op == Op::write && !transfer.operation->aborted()) {
    push(transfer, completion.tag);
  } else {
    if (transfer.op == Op::read) count_moved(transfer);
    release(completion.tag);
  }
}

void Lane::finish_gds(GdsQueue::Completion& completion) {
  Transfer& transfer = transfers_[completion.tag];
  const std::uint64_t length = transfer.piece.length;
  const bool complete = completion.bytes && *completion.bytes == length;
  counters_.count_completion(transfer, {.error = {}, .resumed = !complete}, now_ns() - transfer.submitted_ns);
  if (trace::is_on()) {
    const std::uint64_t moved = complete           ? length
                                : completion.bytes ? whole_gds_blocks(*completion.bytes)
                                                   : 0;
    trace_gds(transfer, moved,
              completion.bytes ? static_cast<std::int64_t>(*completion.bytes)
                               : -std::max(completion.bytes.error().code, 1));
  }
  if (complete) {
    count_moved(transfer);
    release(completion.tag);
  } else if (completion.bytes && *completion.bytes < length) {
    // The file may end there, or the rest not be contiguous: the kernel says which.
    move_rest_through_slot(completion.tag, whole_gds_blocks(*completion.bytes));
  } else {
    Error error =
        completion.bytes
            ? make_error(ErrorKind::device,
                         fmt::format("GPUDirect Storage moved {} bytes of {}, but {} were requested",
                                     *completion.bytes, transfer.member->path, length),
                         transfer.member->path)
            : std::move(completion.bytes.error());
    if (is_gds_required(options_.gpu)) {
      transfer.operation->fail(std::move(error));
      release(completion.tag);
      return;
    }
    if (completion.permanent || completion.bytes) {
      transfer.member->gds_refused.store(true);
      options_.refusals->note(Refused::gds, error);
    }
    move_rest_through_slot(completion.tag, 0);
  }
}

// Queues the part of a piece that GPUDirect Storage has not moved: it goes through a slot.
void Lane::move_rest_through_slot(std::uint32_t tag, std::uint64_t moved) {
  Transfer transfer = std::exchange(transfers_[tag], Transfer{});
  free_tags_.push_back(tag);
  counters_.count_payload(IoPath::gds, moved);
  transfer.operation->add_bytes(moved);
  if (transfer.operation->aborted()) {
    transfer.operation->release_ref();
    return;
  }
  transfer.piece = rest_through_slot(transfer.piece, moved);
  transfer.memory += moved;
  retry_queue_.push_back(std::move(transfer));
}

SlotPool& Lane::slots() {
  if (slots_ == nullptr) {
    slots_ = SlotPool::allocate(options_.slot_bytes, options_.slots, options_.budget);
    if (slots_->slots() > 0) {
      const Status status = backend_->register_memory(slots_->arena());
      registered_ = status.has_value();
      if (!status) options_.refusals->note(Refused::registered_buffers, status.error());
    }
  }
  return *slots_;
}

void Lane::submit(Transfer&& transfer) {
  const std::uint32_t tag = free_tags_.back();
  free_tags_.pop_back();
  Transfer& kept = transfers_[tag] = std::move(transfer);
  if (kept.piece.path == IoPath::gds) {
    kept.submitted_ns = now_ns();
    devices_.start_gds(kept, tag);
  } else if (kept.op == Op::write && kept.piece.through_slot && !is_host(kept.operation->memory())) {
    kept.copy_start_ns = trace::start();
    devices_.start_copy(kept, tag);
  } else {
    push(kept, tag);
  }
}

void Lane::push(Transfer& transfer, std::uint32_t tag) {
  transfer.submitted_ns = phase_ns_;
  Command command = transfer.next_command();
  command.tag = tag;
  backend_->push(command);
}

void Lane::count_moved(const Transfer& transfer) {
  const std::uint64_t bytes = transfer.payload_bytes();
  counters_.count_payload(transfer.effective_path(), bytes);
  transfer.operation->add_bytes(bytes);
}

// Ranges that cannot be read together: without a slot, or where a read of them and the gaps between them
// failed, which a damaged gap must not cause, and whose error would not name the range.
void Lane::read_one_by_one(Transfer transfer) {
  for (const RangeList::Item& item : transfer.ranges) {
    std::uint64_t done = 0;
    while (done < item.length) {
      Transfer& alone = retry_queue_.emplace_back();
      transfer.operation->cursor.plan_alone(item, done, options_.slot_bytes, alone);
      alone.operation = transfer.operation;
      alone.operation->add_ref();
      done += alone.piece.length;
    }
  }
  transfer.operation->release_ref();
}

void Lane::finish(const Completion& completion) {
  Transfer& transfer = transfers_[completion.tag];
  Outcome outcome = handle_result(transfer, completion.result, phase_ns_, counters_);
  switch (outcome.step) {
    case Outcome::Step::resubmit:
      if (!transfer.operation->aborted()) {
        push(transfer, completion.tag);
        return;
      }
      break;
    case Outcome::Step::finished:
      if (transfer.op == Op::sync) break;
      if (transfer.op == Op::read && transfer.piece.through_slot && !is_host(transfer.operation->memory())) {
        transfer.copy_start_ns = trace::start();
        devices_.start_copy(transfer, completion.tag);
        return;
      }
      copy_out(transfer);
      count_moved(transfer);
      break;
    case Outcome::Step::failed:
      if (transfer.ranges.size() > 1 && !transfer.operation->aborted()) {
        free_tags_.push_back(completion.tag);
        read_one_by_one(std::exchange(transfer, Transfer{}));
        return;
      }
      transfer.operation->fail(std::move(outcome.error));
      break;
  }
  release(completion.tag);
}

void Lane::release(std::uint32_t tag) {
  const Transfer ended = std::exchange(transfers_[tag], Transfer{});
  free_tags_.push_back(tag);
  ended.operation->release_ref();
}

}  // namespace trunkline::io
