#include "workload/duration_histogram.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <numeric>

namespace trunkline::workload {
namespace {

constexpr std::uint64_t kSub = 128;
constexpr unsigned kSubBits = std::bit_width(kSub) - 1;

// Below kSub every value has its own bucket; above, the kSubBits bits after the leading one choose among the
// kSub buckets of its power of two.
std::size_t bucket_of(std::uint64_t ns) {
  if (ns < kSub) return ns;
  const unsigned shift = static_cast<unsigned>(std::bit_width(ns)) - 1 - kSubBits;
  return (shift + 1) * kSub + ((ns >> shift) & (kSub - 1));
}

// The largest value that a bucket counts.
std::uint64_t upper_ns(std::size_t bucket) {
  if (bucket < kSub) return bucket;
  const std::size_t shift = bucket / kSub - 1;
  return ((kSub + bucket % kSub + 1) << shift) - 1;
}

}  // namespace

void DurationHistogram::add(std::int64_t ns) {
  const std::size_t bucket = bucket_of(static_cast<std::uint64_t>(std::max<std::int64_t>(0, ns)));
  if (bucket >= buckets_.size()) buckets_.resize(bucket + 1);
  ++buckets_[bucket];
}

std::uint64_t DurationHistogram::count() const {
  return std::accumulate(buckets_.begin(), buckets_.end(), std::uint64_t{0});
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> DurationHistogram::counts() const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> counts;
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    if (buckets_[bucket] != 0) counts.emplace_back(upper_ns(bucket), buckets_[bucket]);
  return counts;
}

}  // namespace trunkline::workload
