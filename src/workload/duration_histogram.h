// Counts durations so that the counts of several processes can be added up exactly.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace trunkline::workload {

// Logarithmic buckets, 128 per power of two of nanoseconds: a percentile is accurate to within 1/128.
class DurationHistogram {
 public:
  void add(std::int64_t ns);  // below 0 counts as 0
  std::uint64_t count() const;
  // (largest duration, count) of each bucket that is not empty, ascending.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> counts() const;

 private:
  std::vector<std::uint64_t> buckets_;  // as many as were needed
};

}  // namespace trunkline::workload
