#include "workload/time_line.h"

#include <algorithm>
#include <utility>

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

void TimeLine::add_step(std::int64_t free, std::int64_t start, std::int64_t end, std::uint64_t bytes) {
  make_room(free, end);
  split(free, start,
        [](TimeBucket& bucket, std::int64_t from, std::int64_t to) { bucket.wait_ns += to - from; });
  split(start, end,
        [](TimeBucket& bucket, std::int64_t from, std::int64_t to) { bucket.compute_ns += to - from; });
  if (free == end) {  // takes no time
    buckets_[static_cast<std::size_t>(end / width_ - first_)].bytes += bytes;
    return;
  }
  split(free, end, [&](TimeBucket& bucket, std::int64_t from, std::int64_t to) {
    bucket.bytes += share(bytes, to - free, end - free) - share(bytes, from - free, end - free);
  });
}

// Makes buckets from the first one to that of `end`.
void TimeLine::make_room(std::int64_t begin, std::int64_t end) {
  if (buckets_.empty()) first_ = begin / width_;
  while (end / width_ - first_ >= static_cast<std::int64_t>(kMostBuckets)) halve();
  const auto needed = static_cast<std::size_t>(end / width_ - first_ + 1);
  if (buckets_.size() < needed) buckets_.resize(needed);
}

void TimeLine::halve() {
  std::vector<TimeBucket> halved;
  const std::int64_t first = first_ / 2;
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    const auto place = static_cast<std::size_t>((first_ + static_cast<std::int64_t>(index)) / 2 - first);
    if (halved.size() <= place) halved.resize(place + 1);
    halved[place].compute_ns += buckets_[index].compute_ns;
    halved[place].wait_ns += buckets_[index].wait_ns;
    halved[place].bytes += buckets_[index].bytes;
  }
  buckets_ = std::move(halved);
  first_ = first;
  width_ *= 2;
}

template <typename Add>
void TimeLine::split(std::int64_t begin, std::int64_t end, Add add) {
  while (begin < end) {
    const std::int64_t place = begin / width_;
    const std::int64_t until = std::min(end, (place + 1) * width_);
    add(buckets_[static_cast<std::size_t>(place - first_)], begin, until);
    begin = until;
  }
}

}  // namespace trunkline::workload
