// Sums over time in a bounded number of buckets.
//
// Buckets begin at multiples of their width on the clock. When there would be too many, each two neighbours
// become one of twice the width. So the buckets of processes on one clock can be added up exactly: all widths
// are kFinestNs times a power of two.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace trunkline {

// Bucket: what is summed up, with an operator +=. Not thread-safe.
template <typename Bucket>
class TimeBuckets {
 public:
  static constexpr std::int64_t kFinestNs = std::int64_t{1} << 20;  // about a millisecond
  static constexpr std::size_t kMostBuckets = 512;

  std::int64_t width_ns() const { return width_; }
  std::int64_t first() const { return first_; }  // the time at which the first bucket begins, in widths
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // Makes buckets from the first one to that of `end`. The first call decides where the first one begins.
  void make_room(std::int64_t begin, std::int64_t end) {
    if (buckets_.empty()) first_ = begin / width_;
    while (end / width_ - first_ >= static_cast<std::int64_t>(kMostBuckets)) halve();
    const auto needed = static_cast<std::size_t>(end / width_ - first_ + 1);
    if (buckets_.size() < needed) buckets_.resize(needed);
  }

  // The bucket of a time that there is room for.
  Bucket& at(std::int64_t time) { return buckets_[static_cast<std::size_t>(time / width_ - first_)]; }

  // Calls `add(bucket, from, to)` for the part of [begin, end) in each bucket. There is room for both.
  template <typename Add>
  void split(std::int64_t begin, std::int64_t end, Add add) {
    while (begin < end) {
      const std::int64_t until = std::min(end, (begin / width_ + 1) * width_);
      add(at(begin), begin, until);
      begin = until;
    }
  }

 private:
  void halve() {
    std::vector<Bucket> halved;
    halved.reserve(buckets_.capacity());
    const std::int64_t first = first_ / 2;
    for (std::size_t index = 0; index < buckets_.size(); ++index) {
      const auto place = static_cast<std::size_t>((first_ + static_cast<std::int64_t>(index)) / 2 - first);
      if (halved.size() <= place) halved.resize(place + 1);
      halved[place] += buckets_[index];
    }
    buckets_ = std::move(halved);
    first_ = first;
    width_ *= 2;
  }

  std::int64_t width_ = kFinestNs;
  std::int64_t first_ = 0;
  std::vector<Bucket> buckets_;
};

}  // namespace trunkline
