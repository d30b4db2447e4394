// What an accelerator did over time, in a bounded number of buckets.
//
// Buckets begin at multiples of their width on the clock. When there would be too many, each two neighbours
// become one of twice the width. So the time lines of processes on one clock can be added up exactly: all
// widths are kFinestNs times a power of two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trunkline::workload {

struct TimeBucket {
  std::int64_t compute_ns = 0;
  std::int64_t wait_ns = 0;  // between steps
  std::uint64_t bytes = 0;   // of samples, spread evenly over the time of their step
};

class TimeLine {
 public:
  static constexpr std::int64_t kFinestNs = std::int64_t{1} << 20;  // about a millisecond
  static constexpr std::size_t kMostBuckets = 512;

  // A step on the clock: `free` is the end of the one before. Times do not decrease from call to call.
  void add_step(std::int64_t free, std::int64_t start, std::int64_t end, std::uint64_t bytes);

  std::int64_t width_ns() const { return width_; }
  std::int64_t first() const { return first_; }  // the time at which the first bucket begins, in widths
  const std::vector<TimeBucket>& buckets() const { return buckets_; }

 private:
  void make_room(std::int64_t begin, std::int64_t end);
  void halve();
  // Calls `add(bucket, from, to)` for the part of [begin, end) in each bucket.
  template <typename Add>
  void split(std::int64_t begin, std::int64_t end, Add add);

  std::int64_t width_ = kFinestNs;
  std::int64_t first_ = 0;
  std::vector<TimeBucket> buckets_;
};

}  // namespace trunkline::workload
