// A thread's wait for a unit to arrive: counted, traced, and logged if it was long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>

#include "base/trace.h"
#include "stream/unit_load_stats.h"
#include "trunkline/error.h"

namespace trunkline {

// It begins with the first call of wait(), and may consist of several. All functions but the constructor are
// called under the lock that guards `counts`.
class UnitWait {
 public:
  // `changed`: notified when a unit may have arrived. `name`: of the unit. The timeout counts from here.
  UnitWait(std::condition_variable& changed, UnitLoadStats& counts, const std::string& name,
           std::optional<std::chrono::nanoseconds> timeout);

  // Waits until something has changed. False once the timeout has passed.
  bool wait(std::unique_lock<std::mutex>& lock);
  // The wait is over; does nothing if there was none.
  void end();

  Error timed_out() const;

 private:
  using Clock = std::chrono::steady_clock;

  std::condition_variable& changed_;
  UnitLoadStats& counts_;
  const std::string& name_;
  std::optional<Clock::time_point> deadline_;
  std::optional<Clock::time_point> began_;
  std::optional<trace::Span> span_;
};

}  // namespace trunkline
