// The cost of a series of transfers: time, CPU, and the engine's own counters.
#pragma once

#include <chrono>
#include <cstdint>

#include "trunkline/engine.h"
#include "trunkline/stats.h"

namespace trunkline::cli {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point begin, Clock::time_point end);

// User and system time of this process so far, over all threads (getrusage RUSAGE_SELF), in seconds.
double process_cpu_seconds();

// The counts between `before` and `after`; pinned bytes are those of `after`.
EngineStats difference(const EngineStats& after, const EngineStats& before);

// Adds counters and histograms; keeps the larger number of pinned bytes.
void accumulate(EngineStats& total, const EngineStats& part);

struct Usage {
  double seconds = 0;
  double cpu_seconds = 0;
  EngineStats stats;
};

// A stopwatch that may be started and stopped several times; adds up the intervals.
class Meter {
 public:
  explicit Meter(const Engine& engine) : engine_(engine) {}

  void start();
  void stop(Clock::time_point last_completion);  // the clock stops at that time

  Clock::time_point started() const { return started_; }  // the most recent start
  const Usage& usage() const { return usage_; }

 private:
  const Engine& engine_;
  EngineStats before_;
  double cpu_before_ = 0;
  Clock::time_point started_;
  Usage usage_;
};

}  // namespace trunkline::cli
