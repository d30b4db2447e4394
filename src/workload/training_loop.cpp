#include "workload/training_loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "os/precise_sleep.h"

namespace trunkline::workload {

TrainingLoop::TrainingLoop(std::unique_ptr<BatchSource> source, TrainingOptions options, Clock& clock,
                           std::unique_ptr<StepBarrier> barrier)
    : source_(std::move(source)),
      options_(options),
      clock_(clock),
      barrier_(std::move(barrier)),
      accelerator_(options.skipped_steps),
      random_(options.seed) {}

void TrainingLoop::begin_epoch() {
  steps_of_epoch_ = 0;
  accelerator_.begin_epoch();
}

void TrainingLoop::pause() { accelerator_.pause(); }

TrainingStats TrainingLoop::stats() const {
  TrainingStats stats = stats_;
  stats.accelerator = accelerator_.stats();
  return stats;
}

Result<bool> TrainingLoop::advance(std::uint64_t steps_of_epoch, std::int64_t limit_ns) {
  const os::FineTimers fine;
  const std::int64_t cpu_before = os::thread_cpu_ns();
  const std::int64_t now = clock_.now();
  accelerator_.resume(now);
  auto done = run(steps_of_epoch, now + limit_ns);
  stats_.loop_cpu_ns += os::thread_cpu_ns() - cpu_before;
  return done;
}

Result<bool> TrainingLoop::run(std::uint64_t steps_of_epoch, std::int64_t limit) {
  while (true) {
    Result<bool> done = true;
    switch (phase_) {
      case Phase::idle:
        if (steps_of_epoch_ >= steps_of_epoch) return finish_step(limit);
        asked_ = clock_.now();
        phase_ = Phase::taking;
        continue;
      case Phase::taking:
        done = take(limit);
        break;
      case Phase::meeting:
        done = meet(limit);
        break;
      case Phase::waiting:
        done = finish_step(limit);
        if (done && *done) start();
        break;
    }
    if (!done || !*done) return done;
  }
}

// Takes batches until there are samples for a step.
Result<bool> TrainingLoop::take(std::int64_t limit) {
  while (samples_taken_ < options_.batch_size) {
    const std::int64_t now = clock_.now();
    // While a step computes, wait no longer than until it ends: its memory may be what the source waits for.
    const std::int64_t until =
        computing_.empty() ? limit : std::min(limit, accelerator_.end().value_or(limit));
    auto batch = source_->next(std::chrono::nanoseconds(std::max<std::int64_t>(0, until - now)));
    if (!batch && batch.error().kind != ErrorKind::timed_out) return std::unexpected(batch.error());
    release_if_ended();
    if (!batch) {
      if (clock_.now() >= limit) return false;
      continue;
    }
    std::uint64_t samples = 0;
    for (const std::uint64_t unit : batch->units) samples += options_.unit_samples.of(unit);
    samples_taken_ += samples;
    taken_.push_back({std::move(*batch), samples});
  }
  ready_ = clock_.now();
  if (barrier_ != nullptr) {
    if (auto arrived = barrier_->arrive(steps_, ready_, accelerator_.end()); !arrived)
      return std::unexpected(arrived.error());
  }
  phase_ = barrier_ != nullptr ? Phase::meeting : Phase::waiting;
  return true;
}

Result<bool> TrainingLoop::meet(std::int64_t limit) {
  while (true) {
    const std::int64_t until =
        computing_.empty() ? limit : std::min(limit, accelerator_.end().value_or(limit));
    auto time = barrier_->wait(steps_, until);
    if (!time) return std::unexpected(time.error());
    release_if_ended();
    if (const std::optional<std::int64_t>& latest = *time; latest) {
      ready_ = *latest;
      phase_ = Phase::waiting;
      return true;
    }
    if (clock_.now() >= limit) return false;
  }
}

// Until the step that computes has ended.
bool TrainingLoop::finish_step(std::int64_t limit) {
  const std::int64_t end = accelerator_.end().value_or(0);
  while (clock_.now() < end) {
    if (clock_.now() >= limit) return false;
    clock_.sleep_until(std::min(end, limit));
  }
  computing_.clear();
  return true;
}

void TrainingLoop::start() {
  std::uint64_t bytes = 0;
  std::uint64_t wanted = options_.batch_size;
  samples_taken_ -= wanted;
  stats_.samples += wanted;
  while (wanted > 0) {
    Taken& front = taken_.front();
    const std::uint64_t used = std::min(wanted, front.samples_left);
    front.samples_left -= used;
    wanted -= used;
    bytes += std::exchange(front.batch.bytes, 0);
    computing_.push_back(front.batch.memory);
    if (front.samples_left == 0) taken_.pop_front();
  }
  accelerator_.step(asked_, ready_, draw_compute(), bytes);
  stats_.bytes += bytes;
  steps_ += 1;
  steps_of_epoch_ += 1;
  phase_ = Phase::idle;
}

void TrainingLoop::release_if_ended() {
  if (!computing_.empty() && clock_.now() >= accelerator_.end().value_or(0)) computing_.clear();
}

std::int64_t TrainingLoop::draw_compute() {
  if (options_.compute_stdev_ns <= 0) return static_cast<std::int64_t>(options_.compute_ns);
  std::normal_distribution<double> distribution(options_.compute_ns, options_.compute_stdev_ns);
  return static_cast<std::int64_t>(std::max(0.0, distribution(random_)));
}

}  // namespace trunkline::workload
