#include "future_object.h"

#include <fmt/format.h>

#include "errors.h"
#include "gil.h"
#include "interruptible.h"
#include "notifier.h"
#include "os/fork_generation.h"

namespace trunkline::python {

namespace nb = nanobind;

namespace {

class ReleaseMemory : public Notifier::Task {
 public:
  explicit ReleaseMemory(std::unique_ptr<BufferView> memory) : memory_(std::move(memory)) {}
  void run() override { memory_.reset(); }

 private:
  std::unique_ptr<BufferView> memory_;
};

}  // namespace

FutureObject* FutureObject::first_ = nullptr;

FutureObject::FutureObject(std::unique_ptr<BufferView> memory)
    : view_(memory->memory()), memory_(std::move(memory)), generation_(os::fork_generation()), next_(first_) {
  memory_->keep_storage();
  if (first_ != nullptr) first_->previous_ = this;
  first_ = this;
}

FutureObject::~FutureObject() {
  unlink();
  if (memory_ == nullptr || !future_.valid()) return;
  // In a forked child the operation is the parent's, and so is the memory that it moves.
  if (generation_ != os::fork_generation() || future_.done()) return;
  std::unique_ptr<Notifier::Task> release = std::make_unique<ReleaseMemory>(std::move(memory_));
  if (!Notifier::instance().when_done(future_, release)) {
    const GilReleased unlocked;  // nobody else can keep the memory until then
    future_.wait();
  }
}

void FutureObject::unlink() {
  if (previous_ != nullptr) previous_->next_ = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  if (first_ == this) first_ = next_;
  previous_ = next_ = nullptr;
}

void FutureObject::settle() {
  if (memory_ == nullptr) return;
  unlink();
  // Moved out first: releasing memory can run Python code that calls this again.
  const std::unique_ptr<BufferView> memory = std::move(memory_);
}

bool FutureObject::done() {
  if (memory_ == nullptr) return true;  // seen before
  // In a forked child nothing of the parent's operation changes any more, and its lock may be held forever.
  if (generation_ != os::fork_generation() || !future_.done()) return false;
  settle();
  return true;
}

void FutureObject::check_own(std::string_view action) const {
  if (generation_ == os::fork_generation()) return;
  raise(make_error(ErrorKind::closed,
                   fmt::format("{}: it was submitted before a fork, by the parent, and only the parent can "
                               "wait for it; submit it again in this process",
                               action)));
}

bool FutureObject::wait(Future::Timeout timeout) {
  if (done()) return true;
  check_own("wait for an operation");
  if (!wait_interruptibly(future_, timeout)) return false;
  settle();
  return true;
}

Result<std::uint64_t> FutureObject::result(Future::Timeout timeout) {
  if (!wait(timeout)) return std::unexpected(wait_timed_out(timeout));
  return future_.result();
}

bool FutureObject::cancel() {
  const GilReleased unlocked;
  return future_.cancel();
}

std::vector<Future> FutureObject::pending() {
  std::vector<Future> futures;
  for (const FutureObject* object = first_; object != nullptr; object = object->next_) {
    if (object->generation_ == os::fork_generation() && object->future_.valid() && !object->future_.done()) {
      futures.push_back(object->future_);
    }
  }
  return futures;
}

Error wait_timed_out(Future::Timeout timeout) {
  const double seconds = std::chrono::duration<double>(timeout.value_or(std::chrono::nanoseconds{0})).count();
  return make_error(ErrorKind::timed_out, fmt::format("wait for an operation: it was not done after {} s, "
                                                      "but continues; wait again, or cancel() it and wait",
                                                      seconds));
}

}  // namespace trunkline::python
