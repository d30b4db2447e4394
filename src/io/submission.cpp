#include "io/submission.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "io/engine_core.h"

namespace trunkline::io {
namespace {

using Clock = std::chrono::steady_clock;

// Enqueued in groups, so that the device works on the first while the rest of a batch is prepared.
constexpr std::size_t kEnqueuedAtOnce = 32;

void end_with(Operation& operation, Error error) {
  operation.fail(std::move(error));
  operation.release_ref();
}

}  // namespace

void end_unsent(Operation& operation) {
  end_with(operation, make_error(ErrorKind::closed, "the engine was closed before the operation was sent"));
}

Submission::Submission(std::shared_ptr<EngineCore> engine, std::span<const Request> requests)
    : engine_(std::move(engine)), requests_(requests) {
  futures_.reserve(requests.size());
  made_.reserve(std::min(requests.size(), kEnqueuedAtOnce));
}

void Submission::make_next() {
  auto operation = engine_->make_operation(requests_[next_++]);
  if (!operation) {
    engine_->count_operation(true);
    futures_.emplace_back(Operation::failed(operation.error()));
    return;
  }
  if ((*operation)->done())
    engine_->count_operation(false);
  else
    made_.push_back(*operation);
  futures_.emplace_back(std::move(*operation));
}

bool Submission::advance(Future::Timeout timeout) {
  const Clock::time_point start = timeout ? Clock::now() : Clock::time_point();
  while (true) {
    while (next_ < requests_.size() && made_.size() < kEnqueuedAtOnce) make_next();
    if (made_.empty()) return true;
    Future::Timeout left;
    if (timeout) left = std::max(*timeout - (Clock::now() - start), std::chrono::nanoseconds{0});
    const std::size_t taken = engine_->enqueue(std::span(made_).subspan(sent_), left);
    if (taken == 0) {
      if (engine_->usable()) return false;
      end_all_unsent();
      continue;
    }
    sent_ += taken;
    if (sent_ < made_.size()) continue;
    made_.clear();
    sent_ = 0;
  }
}

void Submission::end_all_unsent() {
  for (; sent_ < made_.size(); ++sent_) end_unsent(*made_[sent_]);
  made_.clear();
  sent_ = 0;
}

void Submission::give_up() {
  for (; sent_ < made_.size(); ++sent_) {
    end_with(*made_[sent_], make_error(ErrorKind::cancelled,
                                       "the operation was not started: its submission was interrupted while "
                                       "the engine's queue was full"));
  }
  made_.clear();
  sent_ = 0;
}

}  // namespace trunkline::io
