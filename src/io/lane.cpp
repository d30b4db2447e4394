#include "io/lane.h"

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "device/device.h"
#include "io/backends/faulty.h"
#include "io/file_core.h"

namespace trunkline::io {
namespace {

// Of the transfers in flight: enough remain for the device to stay busy.
constexpr unsigned kSharePerReap = 8;

Device& device_of(const MemoryView& memory) {
  return memory.device != nullptr ? *memory.device : host_device();
}

// Signals are for the threads of the program that uses us.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

void copy_out(const Transfer& transfer, const MemoryView& memory) {
  if (transfer.piece.way != Way::bounced || transfer.op != Op::read) return;
  const std::uint64_t rounding = transfer.piece.offset - transfer.piece.span_offset;
  device_of(memory).copy_from_host(transfer.memory, transfer.slot.data() + rounding, transfer.piece.length);
}

void copy_in(const Transfer& transfer, const MemoryView& memory) {
  if (transfer.piece.way != Way::bounced || transfer.op != Op::write) return;
  device_of(memory).copy_to_host(transfer.slot.data(), transfer.memory, transfer.piece.length);
}

void avoid_slot(Transfer& transfer) {
  transfer.piece.way = Way::buffered;
  transfer.piece.span_offset = transfer.piece.offset;
  transfer.piece.span_length = transfer.piece.length;
}

Lane::~Lane() { join(); }

Status Lane::start() {
  std::promise<Status> started;
  auto status = started.get_future();
  {
    const SignalsBlocked blocked;
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
  if (!hungry_.exchange(false)) return false;
  backend_->wake();
  return true;
}

void Lane::join() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  backend_->wake();
  thread_.join();
}

std::optional<Error> Lane::registration_refusal() const {
  const std::scoped_lock lock(refusal_mutex_);
  return registration_refusal_;
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
    if (!free_tags_.empty() && !parked_) {
      hungry_.store(true);
      // Work that came before the flag was set woke nobody.
      if (!queue_.empty()) {
        hungry_.store(false);
        continue;
      }
    }
    completions.clear();
    backend_->reap(completions, wanted());
    hungry_.store(false);
    for (const Completion& completion : completions) finish(completion);
  }
}

// How many completions to wait for. One, while there is room for more work or the end of some may be near;
// but when all places are taken and more work stands in line, each of them waits for all the others anyway,
// and a few at a time spare most of the waking up.
unsigned Lane::wanted() const {
  const bool saturated = free_tags_.empty() && !queue_.empty();
  return saturated ? std::max(1U, options_.depth / kSharePerReap) : 1;
}

void Lane::submit_ready() {
  while (!free_tags_.empty()) {
    Transfer transfer = parked_ ? std::move(*parked_) : queue_.take();
    parked_.reset();
    if (transfer.operation == nullptr) return;
    if (!prepare(transfer)) {
      parked_ = std::move(transfer);
      return;
    }
    send(std::move(transfer));
  }
}

// Gives a bouncing transfer its slot, and a writing one its bytes. False: no slot is free now.
bool Lane::prepare(Transfer& transfer) {
  if (transfer.op == Op::sync || transfer.piece.way != Way::bounced) return true;
  if (slots().slots() == 0) {
    avoid_slot(transfer);
    return true;
  }
  transfer.slot = slots().try_lease();
  if (!transfer.slot.valid()) return false;
  transfer.slot_registered = registered_;
  copy_in(transfer, transfer.operation->memory());
  return true;
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
  sent.sent_ns = now_ns();
  Command command = sent.next_command();
  command.tag = tag;
  backend_->push(command);
}

void Lane::finish(const Completion& completion) {
  Transfer& transfer = transfers_[completion.tag];
  const std::uint64_t now = now_ns();
  Verdict verdict = advance(transfer, completion.result);
  counters_.count_completion(transfer, verdict, now - transfer.sent_ns);
  if (verdict.refused_direct) transfer.member->direct_refused.store(true);
  switch (verdict.step) {
    case Verdict::Step::again:
      if (!transfer.operation->stopped()) {
        transfer.sent_ns = now;
        Command command = transfer.next_command();
        command.tag = completion.tag;
        backend_->push(command);
        return;
      }
      break;
    case Verdict::Step::finished:
      copy_out(transfer, transfer.operation->memory());
      if (transfer.op != Op::sync) {
        counters_.count_payload(transfer.piece.way, transfer.through_cache, transfer.piece.length);
        transfer.operation->add_bytes(transfer.piece.length);
      }
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
  ended.operation->end_share();
}

}  // namespace trunkline::io
