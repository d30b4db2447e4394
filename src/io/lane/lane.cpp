#include "io/lane/lane.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "device/device.h"
#include "io/backends/faulty.h"
#include "io/file/file_core.h"
#include "mem/streaming_copy.h"
#include "os/signals_blocked.h"

namespace trunkline::io {
namespace {

// Of the transfers in flight: enough remain for the device to stay busy.
constexpr unsigned kSharePerReap = 8;

}  // namespace

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

namespace {

// Where the payload of a transfer is, or will be, in its slot.
std::byte* payload(const Transfer& transfer) {
  return transfer.slot.data() + (transfer.piece.offset - transfer.piece.span_offset);
}

}  // namespace

void copy_out(const Transfer& transfer) {
  if (transfer.piece.through_slot && transfer.op == Op::read)
    streaming_copy(transfer.memory, payload(transfer), transfer.piece.length);
}

void copy_in(const Transfer& transfer) {
  if (transfer.piece.through_slot && transfer.op == Op::write)
    streaming_copy(payload(transfer), transfer.memory, transfer.piece.length);
}

void avoid_slot(Transfer& transfer) {
  transfer.piece.path = IoPath::buffered;
  transfer.piece.through_slot = false;
  transfer.piece.span_offset = transfer.piece.offset;
  transfer.piece.span_length = transfer.piece.length;
}

Lane::~Lane() { join(); }

Status Lane::start() {
  std::promise<Status> started;
  auto status = started.get_future();
  {
    const os::SignalsBlocked blocked;
    try {
      thread_ = std::thread([this, &started] { run(started); });
    } catch (const std::system_error& error) {
      return std::unexpected(system_error(error.code().value(), "starting a lane's thread"));
    }
  }
  Status result = status.get();
  if (!result) thread_.join();
  return result;
}

bool Lane::wake_if_hungry() {
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

std::optional<Error> Lane::registration_refusal() const {
  const std::scoped_lock lock(refusal_mutex_);
  return registration_refusal_;
}

std::optional<Error> Lane::pin_refusal() const {
  const std::scoped_lock lock(refusal_mutex_);
  return pin_refusal_;
}

void Lane::run(std::promise<Status>& started) {
  pthread_setname_np(pthread_self(), fmt::format("trunkline-{}", options_.index).c_str());
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
    for (const auto& [device, copies] : copies_) copies->send();
    for (const auto& [device, queue] : gds_queues_) queue->send();
    if (!free_tags_.empty() && !waiting_for_slot_) {
      wants_work_.store(true);
      // Work that came before the flag was set woke nobody.
      if (!queue_.empty()) {
        wants_work_.store(false);
        continue;
      }
    }
    completions.clear();
    backend_->reap(completions, wanted());
    wants_work_.store(false);
    for (const Completion& completion : completions) finish(completion);
    finish_copies();
    finish_gds();
  }
  ended_.set_value();
}

// How many completions to wait for. One, while there is room for more work or the end of some may be near;
// but when all places are taken and more work stands in line, each of them waits for all the others anyway,
// and a few at a time spare most of the waking up.
unsigned Lane::wanted() const {
  const bool saturated = free_tags_.empty() && !queue_.empty() && copying_ == 0;
  return saturated ? std::max(1U, options_.depth / kSharePerReap) : 1;
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
  while (!free_tags_.empty()) {
    Transfer transfer = next_transfer();
    if (transfer.operation == nullptr) return;
    auto ready = prepare(transfer);
    if (!ready) {
      transfer.operation->fail(std::move(ready.error()));
      transfer.operation->release_ref();
    } else if (!*ready) {
      waiting_for_slot_ = std::move(transfer);
      return;
    } else {
      send(std::move(transfer));
    }
  }
}

// Gives a transfer its slot, and one that writes from the host its bytes. False: no slot is free now.
Result<bool> Lane::prepare(Transfer& transfer) {
  if (transfer.op == Op::sync) return true;
  const MemoryView& memory = transfer.operation->memory();
  if (transfer.piece.path == IoPath::gds) {
    if (auto opened = gds_queue_of(*memory.device); !opened) return std::unexpected(opened.error());
    return true;
  }
  if (!transfer.piece.through_slot) return true;
  const bool on_host = is_host(memory);
  // The budget may have room by now, and this cannot do without.
  if (!on_host && slots_ != nullptr && slots_->slots() == 0) slots_.reset();
  if (slots().slots() == 0) {
    if (!on_host) {
      return std::unexpected(make_error(
          ErrorKind::out_of_budget,
          fmt::format("memory of {} needs a bounce buffer, and the budget of {} bytes of pinned memory has "
                      "no room for one; free buffers or raise pinned_budget_bytes",
                      memory.device->name(), options_.budget->limit_bytes())));
    }
    avoid_slot(transfer);
    return true;
  }
  if (!on_host) {
    if (auto opened = copies_of(*memory.device); !opened) return std::unexpected(opened.error());
  }
  transfer.slot = slots().try_lease();
  if (!transfer.slot.valid()) return false;
  transfer.slot_registered = registered_;
  if (on_host) copy_in(transfer);
  return true;
}

// Opened when a transfer first needs it, and the slots are made known to the device.
Result<CopyQueue*> Lane::copies_of(Device& device) {
  for (const auto& [known, copies] : copies_) {
    if (known == &device) return copies.get();
  }
  auto opened = device.open_queue([this] { backend_->wake(); });
  if (!opened) return std::unexpected(opened.error());
  if (pin_ == nullptr) {
    auto pinned = device.pin(slots().arena());
    const std::scoped_lock lock(refusal_mutex_);
    if (pinned)
      pin_ = std::move(*pinned);
    else
      pin_refusal_ = pinned.error();
  }
  return copies_.emplace_back(&device, std::move(*opened)).second.get();
}

void Lane::start_copy(Transfer& transfer, std::uint32_t tag) {
  const MemoryView& memory = transfer.operation->memory();
  (*copies_of(*memory.device))
      ->start({.direction = transfer.op == Op::read ? Direction::from_host : Direction::to_host,
               .host = payload(transfer),
               .device = transfer.memory,
               .bytes = transfer.piece.length,
               .after = transfer.operation->fence(),
               .tag = tag});
  ++copying_;
}

void Lane::finish_copies() {
  if (copying_ == 0) return;
  std::vector<CopyQueue::Ended> ended;
  for (const auto& [device, copies] : copies_) copies->take(ended);
  for (CopyQueue::Ended& copy : ended) {
    --copying_;
    Transfer& transfer = transfers_[copy.tag];
    if (copy.error) {
      transfer.operation->fail(std::move(*copy.error));
      release(copy.tag);
    } else if (transfer.op == Op::write && !transfer.operation->aborted()) {
      push(transfer, copy.tag);
    } else {
      if (transfer.op == Op::read) count_moved(transfer);
      release(copy.tag);
    }
  }
}

std::optional<Error> Lane::gds_refusal() const {
  const std::scoped_lock lock(refusal_mutex_);
  return gds_refusal_;
}

Result<GdsQueue*> Lane::gds_queue_of(Device& device) {
  for (const auto& [known, queue] : gds_queues_) {
    if (known == &device) return queue.get();
  }
  auto opened = device.open_gds_queue([this] { backend_->wake(); });
  if (!opened) return std::unexpected(opened.error());
  return gds_queues_.emplace_back(&device, std::move(*opened)).second.get();
}

void Lane::start_gds(Transfer& transfer, std::uint32_t tag) {
  transfer.sent_ns = now_ns();
  ++copying_;
  (*gds_queue_of(*transfer.operation->memory().device))
      ->start({.to_file = transfer.op == Op::write,
               .file = transfer.member->gds,
               .offset = transfer.piece.offset,
               .device = transfer.memory,
               .bytes = transfer.piece.length,
               .after = transfer.operation->fence(),
               .tag = tag});
}

void Lane::finish_gds() {
  std::vector<GdsQueue::Ended> ended;
  for (const auto& [device, queue] : gds_queues_) queue->take(ended);
  for (GdsQueue::Ended& each : ended) finish_gds(each);
}

void Lane::finish_gds(GdsQueue::Ended& ended) {
  --copying_;
  Transfer& transfer = transfers_[ended.tag];
  const std::uint64_t length = transfer.piece.length;
  const bool complete = ended.bytes && *ended.bytes == length;
  counters_.count_completion(transfer, {.error = {}, .resumed = !complete}, now_ns() - transfer.sent_ns);
  if (complete) {
    count_moved(transfer);
    release(ended.tag);
  } else if (ended.bytes && *ended.bytes < length) {
    // The file may end there, or the rest not be contiguous: the kernel says which.
    copy_rest(ended.tag, *ended.bytes / kGdsAlignment * kGdsAlignment);
  } else {
    Error error = ended.bytes
                      ? make_error(ErrorKind::device,
                                   fmt::format("GPUDirect Storage moved {} bytes of {}: {} were asked for",
                                               *ended.bytes, transfer.member->path, length),
                                   transfer.member->path)
                      : std::move(ended.bytes.error());
    if (options_.gpu == GpuPath::gds) {
      transfer.operation->fail(std::move(error));
      release(ended.tag);
      return;
    }
    if (ended.again || ended.bytes) {
      transfer.member->gds_refused.store(true);
      const std::scoped_lock lock(refusal_mutex_);
      if (!gds_refusal_) gds_refusal_ = std::move(error);
    }
    copy_rest(ended.tag, 0);
  }
}

// What the device has not moved of its piece goes through a slot, in its turn.
void Lane::copy_rest(std::uint32_t tag, std::uint64_t moved) {
  Transfer transfer = std::exchange(transfers_[tag], Transfer{});
  free_tags_.push_back(tag);
  counters_.count_payload(IoPath::gds, false, moved);
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
      if (!status) {
        const std::scoped_lock lock(refusal_mutex_);
        registration_refusal_ = status.error();
      }
    }
  }
  return *slots_;
}

void Lane::send(Transfer&& transfer) {
  const std::uint32_t tag = free_tags_.back();
  free_tags_.pop_back();
  Transfer& sent = transfers_[tag] = std::move(transfer);
  if (sent.piece.path == IoPath::gds)
    start_gds(sent, tag);
  else if (sent.op == Op::write && sent.piece.through_slot && !is_host(sent.operation->memory()))
    start_copy(sent, tag);
  else
    push(sent, tag);
}

void Lane::push(Transfer& transfer, std::uint32_t tag) {
  transfer.sent_ns = now_ns();
  Command command = transfer.next_command();
  command.tag = tag;
  backend_->push(command);
}

void Lane::count_moved(const Transfer& transfer) {
  counters_.count_payload(transfer.piece.path, transfer.through_cache, transfer.piece.length);
  transfer.operation->add_bytes(transfer.piece.length);
}

void Lane::finish(const Completion& completion) {
  Transfer& transfer = transfers_[completion.tag];
  const std::uint64_t now = now_ns();
  Verdict verdict = advance(transfer, completion.result);
  counters_.count_completion(transfer, verdict, now - transfer.sent_ns);
  if (verdict.refused_direct) transfer.member->direct_refused.store(true);
  switch (verdict.step) {
    case Verdict::Step::again:
      if (!transfer.operation->aborted()) {
        push(transfer, completion.tag);
        return;
      }
      break;
    case Verdict::Step::finished:
      if (transfer.op == Op::sync) break;
      if (transfer.op == Op::read && transfer.piece.through_slot && !is_host(transfer.operation->memory())) {
        start_copy(transfer, completion.tag);
        return;
      }
      copy_out(transfer);
      count_moved(transfer);
      break;
    case Verdict::Step::failed:
      transfer.operation->fail(std::move(verdict.error));
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
