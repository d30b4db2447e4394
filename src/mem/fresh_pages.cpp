#include "mem/fresh_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <ctime>

#include "mem/page_sizes.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

#ifdef MADV_POPULATE_WRITE
// While the kernel populates memory, no other thread can change the memory map, and once one waits for that,
// no further thread can populate: so each call is short.
constexpr std::uint64_t kSmallPagesPiece = 256 * kKiB;

std::int64_t thread_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

std::byte* round_down(std::byte* data, std::uint64_t to) {
  return data - (reinterpret_cast<std::uintptr_t>(data) % to);
}
std::byte* round_up(std::byte* data, std::uint64_t to) { return round_down(data + to - 1, to); }

// A property of the machine, so there is one for the process.
PageSizePolicy policy;

// Marks the memory of all pages that are to be small at once: see kSmallPagesPiece.
void mark_small(std::byte* data, std::uint64_t bytes, FreshMapping& mapping) {
  ::madvise(data, bytes, MADV_NOHUGEPAGE);
  std::byte* const until = data + bytes;
  std::byte* known = mapping.small_until.load();
  while (known < until && !mapping.small_until.compare_exchange_weak(known, until)) {
  }
}

void populate_huge(std::byte* page) {
  const std::int64_t before = thread_cpu_ns();
  ::madvise(page, kHugePageBytes, MADV_POPULATE_WRITE);
  policy.add_price(thread_cpu_ns() - before);
}

void populate_small(std::byte* data, const std::byte* end) {
  while (data < end) {
    const auto piece = std::min<std::uint64_t>(kSmallPagesPiece, end - data);
    ::madvise(data, piece, MADV_POPULATE_WRITE);
    data += piece;
  }
}
#endif

}  // namespace

int PageSizePolicy::next_small() {
  const int left = small_left_.load(std::memory_order_relaxed);
  if (left > 0) small_left_.store(left - 1, std::memory_order_relaxed);
  return left;
}

void PageSizePolicy::add_price(std::int64_t cpu_ns) {
  int stretch = kLeastSmall;
  if (cpu_ns > kExpensiveNs) {
    stretch = stretch_.load(std::memory_order_relaxed);
    small_left_.store(stretch, std::memory_order_relaxed);
    stretch = std::min(2 * stretch, kMostSmall);
  }
  stretch_.store(stretch, std::memory_order_relaxed);
}

void populate_pages([[maybe_unused]] std::byte* data, [[maybe_unused]] std::uint64_t bytes,
                    [[maybe_unused]] FreshMapping& mapping) {
#ifdef MADV_POPULATE_WRITE
  std::byte* const mapping_end = round_up(mapping.data + mapping.bytes, kPageBytes);
  std::byte* const end = std::min(round_up(data + bytes, kHugePageBytes), mapping_end);
  std::byte* at = data == mapping.data ? round_down(data, kPageBytes) : round_up(data, kHugePageBytes);
  while (at < end) {
    std::byte* const next = std::min(round_down(at, kHugePageBytes) + kHugePageBytes, end);
    const bool is_huge = next - at == static_cast<std::ptrdiff_t>(kHugePageBytes);
    const int small = is_huge ? policy.next_small() : 0;
    const bool is_marked = at < mapping.small_until.load();
    if (small > 0 && !is_marked)
      mark_small(at, std::min<std::uint64_t>(small * kHugePageBytes, mapping_end - at), mapping);
    if (is_huge && small == 0 && !is_marked) {
      populate_huge(at);
    } else {
      populate_small(at, next);
    }
    at = next;
  }
#endif
}

}  // namespace trunkline
