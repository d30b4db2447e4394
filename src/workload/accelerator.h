// An emulated accelerator: a queue of steps on its own clock.
//
// Step k starts when its batch is ready and step k - 1 has ended, and ends after its computation. That the
// thread which drives it wakes up late changes nothing, unless a batch was ready late. All times are
// nanoseconds of one clock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "workload/duration_histogram.h"
#include "workload/time_line.h"

namespace trunkline::workload {

// One epoch, counted as DLIO does: without the first steps.
struct EpochTimes {
  std::uint64_t steps = 0;      // all
  std::int64_t busy_ns = 0;     // computation of the steps that count
  std::int64_t running_ns = 0;  // from the end of the last step that does not count to that of the last one
};

struct AcceleratorStats {
  std::uint64_t steps = 0;
  std::int64_t busy_ns = 0;           // computation
  std::int64_t running_ns = 0;        // with the time between steps, without pauses
  std::int64_t first_busy_ns = 0;     // of these, what the first step of all has
  std::int64_t first_running_ns = 0;  // with the time until it started
  std::int64_t late_loop_ns = 0;  // of the time between steps: the loop did not look for the batch in time
  DurationHistogram step_times;   // from the end of a step to that of the next one, but the first
  DurationHistogram waits;        // from the end of a step to the start of the next one, but the first
  std::vector<EpochTimes> epochs;
  TimeLine time_line;
};

class Accelerator {
 public:
  // `skipped_steps`: at the start of each epoch, which do not count for its times.
  explicit Accelerator(std::uint64_t skipped_steps) : skipped_steps_(skipped_steps) {}

  void begin_epoch();
  // From then on it is not running: the time until resume() counts nowhere, also within an epoch. After the
  // last step has ended.
  void pause();
  // It runs from `now` on, unless it runs already.
  void resume(std::int64_t now);

  // `asked`: when the loop began to look for the batch. `bytes`: of its samples.
  void step(std::int64_t asked, std::int64_t ready, std::int64_t compute, std::uint64_t bytes = 0);

  // The end of the last step; nullopt if there was none since the start or a pause.
  std::optional<std::int64_t> end() const { return end_; }
  const AcceleratorStats& stats() const { return stats_; }

 private:
  const std::uint64_t skipped_steps_;
  std::optional<std::int64_t> resumed_;
  std::optional<std::int64_t> end_;
  std::optional<std::int64_t> paused_;  // the end of the last step before a pause
  std::int64_t epoch_begin_ = 0;        // of what counts
  AcceleratorStats stats_;
};

}  // namespace trunkline::workload
