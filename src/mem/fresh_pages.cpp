#include "mem/fresh_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <ctime>

#include "trunkline/units.h"

namespace trunkline {
namespace {

constexpr std::uint64_t kHugePageBytes = 2 * kMiB;
constexpr std::int64_t kExpensiveNs = 1'500'000;  // zeroing one takes 200 us
constexpr int kSmallAfterExpensive = 16;          // in units of huge pages; keeps the trials cheap

#ifdef MADV_POPULATE_WRITE
std::int64_t thread_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// A property of the machine, so there is one for the process. A lost update only means one trial too many or
// too few.
std::atomic<int> small_left{0};
#endif

}  // namespace

void populate_pages([[maybe_unused]] std::byte* data, [[maybe_unused]] std::uint64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  const std::byte* end = data + bytes;
  while (data < end) {
    const std::uint64_t into_page = reinterpret_cast<std::uintptr_t>(data) % kHugePageBytes;
    const std::uint64_t piece = std::min<std::uint64_t>(kHugePageBytes - into_page, end - data);
    const bool whole = piece == kHugePageBytes;
    if (whole && small_left.load(std::memory_order_relaxed) > 0) {
      small_left.fetch_sub(1, std::memory_order_relaxed);
      ::madvise(data, piece, MADV_NOHUGEPAGE);
      ::madvise(data, piece, MADV_POPULATE_WRITE);
    } else {
      const std::int64_t before = thread_cpu_ns();
      ::madvise(data, piece, MADV_POPULATE_WRITE);
      if (whole && thread_cpu_ns() - before > kExpensiveNs)
        small_left.store(kSmallAfterExpensive, std::memory_order_relaxed);
    }
    data += piece;
  }
#endif
}

}  // namespace trunkline
