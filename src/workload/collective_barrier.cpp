#include "workload/collective_barrier.h"

#include <algorithm>

namespace trunkline::workload {
namespace {

// Until the next poll: a share of the wait so far, so that a long wait costs little processor time and a
// short one ends soon after the last rank has arrived.
std::int64_t poll_interval(std::int64_t waited) {
  constexpr std::int64_t kShare = 50;
  constexpr std::int64_t kLeast = 20'000;
  constexpr std::int64_t kMost = 1'000'000;
  return std::clamp(waited / kShare, kLeast, kMost);
}

}  // namespace

Result<void> CollectiveBarrier::arrive(std::uint64_t /*step*/, std::int64_t ready,
                                       std::optional<std::int64_t> end) {
  arrived_ = ready;
  end_ = end;
  return reduction_.begin(std::max<std::int64_t>(0, ready - end.value_or(ready)));
}

Result<std::optional<std::int64_t>> CollectiveBarrier::wait(std::uint64_t /*step*/, std::int64_t deadline) {
  while (true) {
    const auto polled = reduction_.poll();
    if (!polled) return std::unexpected(polled.error());
    const std::int64_t now = clock_.now();
    // All have arrived, so a step that begins late begins by now.
    if (const std::optional<std::int64_t>& late = *polled)
      return end_ ? std::max(*end_, std::min(*end_ + *late, now)) : now;
    if (now >= deadline) return std::nullopt;
    clock_.sleep_until(std::min(deadline, now + poll_interval(now - arrived_)));
  }
}

}  // namespace trunkline::workload
