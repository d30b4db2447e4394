#include "workload/time_line.h"

#include <algorithm>

namespace trunkline::workload {
namespace {

// The part of `bytes` that belongs to the first `part` of `whole`, so that parts of a step add up exactly.
std::uint64_t share(std::uint64_t bytes, std::int64_t part, std::int64_t whole) {
  if (part >= whole) return bytes;
  const long double exact =
      static_cast<long double>(bytes) * static_cast<long double>(part) / static_cast<long double>(whole);
  return std::min(bytes, static_cast<std::uint64_t>(exact));
}

}  // namespace

TimeBucket& TimeBucket::operator+=(const TimeBucket& other) {
  compute_ns += other.compute_ns;
  wait_ns += other.wait_ns;
  bytes += other.bytes;
  return *this;
}

void TimeLine::add_step(std::int64_t free, std::int64_t start, std::int64_t end, std::uint64_t bytes) {
  sums_.make_room(free, end);
  sums_.split(free, start,
              [](TimeBucket& bucket, std::int64_t from, std::int64_t to) { bucket.wait_ns += to - from; });
  sums_.split(start, end,
              [](TimeBucket& bucket, std::int64_t from, std::int64_t to) { bucket.compute_ns += to - from; });
  if (free == end) {  // takes no time
    sums_.at(end).bytes += bytes;
    return;
  }
  sums_.split(free, end, [&](TimeBucket& bucket, std::int64_t from, std::int64_t to) {
    bucket.bytes += share(bytes, to - free, end - free) - share(bytes, from - free, end - free);
  });
}

}  // namespace trunkline::workload
