// Sleeping until a point in time without spinning, and waking close to it.
#pragma once

#include <cstdint>

namespace trunkline::os {

// Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
std::int64_t monotonic_ns();

// Processor time of the calling thread.
std::int64_t thread_cpu_ns();

// Returns at that time of CLOCK_MONOTONIC, or when a signal was handled.
void sleep_until_ns(std::int64_t deadline);

// While it lives, the kernel wakes the calling thread when its sleep ends, and not up to 50 us later, to wake
// others with it (PR_SET_TIMERSLACK). For one thread.
class FineTimers {
 public:
  FineTimers();
  FineTimers(const FineTimers&) = delete;
  FineTimers& operator=(const FineTimers&) = delete;
  ~FineTimers();

 private:
  int before_;
};

}  // namespace trunkline::os
