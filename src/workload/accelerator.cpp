#include "workload/accelerator.h"

#include <algorithm>

namespace trunkline::workload {

void Accelerator::begin_epoch() { stats_.epochs.emplace_back(); }

void Accelerator::pause() {
  if (end_) paused_ = end_;
  end_.reset();
  resumed_.reset();
}

void Accelerator::resume(std::int64_t now) {
  if (resumed_) return;
  resumed_ = now;
  if (paused_) epoch_begin_ += now - *paused_;
  paused_.reset();
}

void Accelerator::step(std::int64_t asked, std::int64_t ready, std::int64_t compute, std::uint64_t bytes) {
  const std::int64_t free = end_.value_or(resumed_.value_or(ready));
  const std::int64_t start = std::max(free, ready);
  const std::int64_t end = start + compute;
  const bool is_first = stats_.steps == 0;
  stats_.steps += 1;
  stats_.busy_ns += compute;
  stats_.running_ns += end - free;
  stats_.time_line.add_step(free, start, end, bytes);
  if (is_first) {
    stats_.first_busy_ns = compute;
    stats_.first_running_ns = end - free;
  }
  if (end_) {
    stats_.step_times.add(end - free);
    stats_.waits.add(start - free);
    stats_.late_loop_ns += std::clamp<std::int64_t>(asked - free, 0, start - free);
  }
  if (!stats_.epochs.empty()) {
    EpochTimes& epoch = stats_.epochs.back();
    epoch.steps += 1;
    if (epoch.steps > skipped_steps_) {
      if (epoch.steps == 1) epoch_begin_ = free;
      epoch.busy_ns += compute;
      epoch.running_ns = end - epoch_begin_;
    } else {
      epoch_begin_ = end;
    }
  }
  end_ = end;
}

}  // namespace trunkline::workload
