// How many reads, and bytes, were in flight over time, in a bounded number of buckets.
#pragma once

#include <cstdint>
#include <vector>

#include "base/time_buckets.h"

namespace trunkline::io {

// Divided by the width of a bucket: the mean number of reads and of bytes in flight.
struct InFlightBucket {
  std::int64_t read_ns = 0;  // the time that each read was in flight, added up
  double byte_ns = 0;        // of each byte

  InFlightBucket& operator+=(const InFlightBucket& other);
};

// Not thread-safe.
class ReadsInFlight {
 public:
  // `now`: of CLOCK_MONOTONIC. What was in flight earlier does not count.
  explicit ReadsInFlight(std::int64_t now);

  // A read that was in flight from `begin` until `end`, in any order of reads.
  void add(std::int64_t begin, std::int64_t end, std::uint64_t bytes);

  const TimeBuckets<InFlightBucket>& sums() const { return sums_; }

 private:
  std::int64_t start_;
  TimeBuckets<InFlightBucket> sums_;
};

}  // namespace trunkline::io
