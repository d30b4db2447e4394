#include "workload/shared_barrier.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "os/precise_sleep.h"

namespace trunkline::workload {
namespace {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
                  std::atomic<std::int64_t>::is_always_lock_free,
              "shared between processes");

std::uint32_t* word(const std::atomic<std::uint32_t>& value) {
  return reinterpret_cast<std::uint32_t*>(const_cast<std::atomic<std::uint32_t>*>(&value));
}

void wake_all(const std::atomic<std::uint32_t>& value) {
  ::syscall(SYS_futex, word(value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC (futex(2)).
void wait_while(const std::atomic<std::uint32_t>& value, std::uint32_t seen, std::int64_t deadline) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const timespec until{.tv_sec = deadline / kSecond, .tv_nsec = deadline % kSecond};
  ::syscall(SYS_futex, word(value), FUTEX_WAIT_BITSET, seen, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

Result<void> SharedBarrier::arrive(std::uint64_t step, std::int64_t ready, std::optional<std::int64_t> end) {
  const std::int64_t time = std::max(ready, end.value_or(ready));
  BarrierMemory::Slot& slot = memory_.slots[step % BarrierMemory::kSlots];
  std::int64_t latest = slot.latest.load();
  while (latest < time && !slot.latest.compare_exchange_weak(latest, time)) {
  }
  if (slot.arrived.fetch_add(1) + 1 == complete_count(step)) wake_all(slot.arrived);
  return {};
}

Result<std::optional<std::int64_t>> SharedBarrier::wait(std::uint64_t step, std::int64_t deadline) {
  const BarrierMemory::Slot& slot = memory_.slots[step % BarrierMemory::kSlots];
  const std::uint32_t wanted = complete_count(step);
  while (true) {
    if (memory_.aborted.load() != 0)
      return std::unexpected(make_error(ErrorKind::cancelled, "another rank has ended"));
    const std::uint32_t arrived = slot.arrived.load();
    if (arrived == wanted) return slot.latest.load();
    if (os::monotonic_ns() >= deadline) return std::nullopt;
    wait_while(slot.arrived, arrived, deadline);
  }
}

// Wraps as the count does.
std::uint32_t SharedBarrier::complete_count(std::uint64_t step) const {
  return static_cast<std::uint32_t>(step / BarrierMemory::kSlots + 1) * ranks_;
}

void SharedBarrier::abort(BarrierMemory& memory) {
  memory.aborted.store(1);
  for (const BarrierMemory::Slot& slot : memory.slots) wake_all(slot.arrived);
}

}  // namespace trunkline::workload
