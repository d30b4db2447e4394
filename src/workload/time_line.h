// What an accelerator did over time, in a bounded number of buckets (base/time_buckets.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/time_buckets.h"

namespace trunkline::workload {

struct TimeBucket {
  std::int64_t compute_ns = 0;
  std::int64_t wait_ns = 0;  // between steps
  std::uint64_t bytes = 0;   // of samples, spread evenly over the time of their step

  TimeBucket& operator+=(const TimeBucket& other);
};

class TimeLine {
 public:
  static constexpr std::int64_t kFinestNs = TimeBuckets<TimeBucket>::kFinestNs;
  static constexpr std::size_t kMostBuckets = TimeBuckets<TimeBucket>::kMostBuckets;

  // A step on the clock: `free` is the end of the one before. Times do not decrease from call to call.
  void add_step(std::int64_t free, std::int64_t start, std::int64_t end, std::uint64_t bytes);

  std::int64_t width_ns() const { return sums_.width_ns(); }
  std::int64_t first() const { return sums_.first(); }  // see TimeBuckets
  const std::vector<TimeBucket>& buckets() const { return sums_.buckets(); }

 private:
  TimeBuckets<TimeBucket> sums_;
};

}  // namespace trunkline::workload
