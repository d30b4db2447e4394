#include "stream/unit_wait.h"

#include <fmt/format.h>

#include "base/log.h"
#include "base/waits.h"
#include "stream/stream_trace.h"

namespace trunkline {

UnitWait::UnitWait(std::condition_variable& changed, UnitLoadStats& counts, const std::string& name,
                   std::optional<std::chrono::nanoseconds> timeout)
    : changed_(changed), counts_(counts), name_(name) {
  if (timeout) deadline_ = Clock::now() + *timeout;
}

bool UnitWait::wait(std::unique_lock<std::mutex>& lock) {
  if (!began_) {
    began_ = Clock::now();
    span_.emplace(kUnitWait, name_);
    ++counts_.waited;
  }
  if (deadline_) return changed_.wait_until(lock, *deadline_) == std::cv_status::no_timeout;
  changed_.wait(lock);
  return true;
}

void UnitWait::end() {
  span_.reset();
  if (!began_) return;
  const std::uint64_t waited_ns = ns_since(*began_);
  began_.reset();
  counts_.wait_ns += waited_ns;
  if (waited_ns < kLongWaitNs) return;
  log::info(log::Component::stream, "waited {:.1f} s for {} to be read", static_cast<double>(waited_ns) / 1e9,
            name_);
}

Error UnitWait::timed_out() const {
  return make_error(ErrorKind::timed_out, fmt::format("{} has not arrived yet", name_));
}

}  // namespace trunkline
