// The clock of a training loop, which tests replace.
#pragma once

#include <cstdint>

#include "os/precise_sleep.h"

namespace trunkline::workload {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t now() = 0;                       // nanoseconds
  virtual void sleep_until(std::int64_t deadline) = 0;  // may return early
};

class SystemClock final : public Clock {
 public:
  std::int64_t now() override { return os::monotonic_ns(); }
  void sleep_until(std::int64_t deadline) override { os::sleep_until_ns(deadline); }
};

}  // namespace trunkline::workload
