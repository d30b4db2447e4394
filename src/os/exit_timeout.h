// How long the process, on exit, waits for a device that makes no progress.
#pragma once

#include <chrono>
#include <utility>

namespace trunkline::os {

// How long the exit waits without progress: TRUNKLINE_EXIT_TIMEOUT in the environment, in seconds, else 120.
// Without a limit, a device that hangs would keep the process from exiting.
std::chrono::milliseconds exit_timeout();

// How long `Progress`, a value that changes whenever something moves, has stayed the same.
template <class Progress>
class StallTimer {
 public:
  using Clock = std::chrono::steady_clock;

  StallTimer(Progress progress, Clock::time_point now) : progress_(std::move(progress)), since_(now) {}

  Clock::duration stalled_for(const Progress& progress, Clock::time_point now) {
    if (progress != progress_) {
      progress_ = progress;
      since_ = now;
    }
    return now - since_;
  }

 private:
  Progress progress_;
  Clock::time_point since_;
};

}  // namespace trunkline::os
