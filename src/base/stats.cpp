#include "trunkline/stats.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace trunkline {
namespace {

constexpr unsigned kSub = LatencyHistogram::kSubBuckets;
constexpr unsigned kSubBits = std::bit_width(kSub) - 1;

// Below kSub every value has its own bucket; above, the kSubBits bits after the leading one choose among the
// kSub buckets of its power of two. Values beyond the last bucket (292 years) are counted in it.
std::size_t bucket_of(std::uint64_t ns) {
  if (ns < kSub) return ns;
  const unsigned shift = static_cast<unsigned>(std::bit_width(ns)) - 1 - kSubBits;
  const std::size_t bucket = std::size_t{shift + 1} * kSub + ((ns >> shift) & (kSub - 1));
  return std::min<std::size_t>(bucket, LatencyHistogram::kBuckets - 1);
}

// The largest value that a bucket counts.
std::uint64_t upper_ns(std::size_t bucket) {
  if (bucket < kSub) return bucket;
  const std::size_t shift = bucket / kSub - 1;
  return ((std::uint64_t{kSub} + bucket % kSub + 1) << shift) - 1;
}

}  // namespace

void LatencyHistogram::add(std::uint64_t ns) {
  ++buckets_[bucket_of(ns)];
  ++count_;
  sum_ns_ += ns;
}

void LatencyHistogram::add(const LatencyHistogram& other) {
  for (std::size_t i = 0; i < kBuckets; ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  sum_ns_ += other.sum_ns_;
}

void LatencyHistogram::subtract(const LatencyHistogram& other) {
  for (std::size_t i = 0; i < kBuckets; ++i) buckets_[i] -= other.buckets_[i];
  count_ -= other.count_;
  sum_ns_ -= other.sum_ns_;
}

std::uint64_t LatencyHistogram::percentile(double percent) const {
  if (count_ == 0) return 0;
  const double share = std::clamp(percent, 0.0, 100.0) / 100.0;
  // Nearest rank: the smallest value that at least this share of all values does not exceed.
  const auto rank = static_cast<std::uint64_t>(std::ceil(share * static_cast<double>(count_)));
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < kBuckets; ++i) {
    seen += buckets_[i];
    if (seen != 0 && seen >= rank) return upper_ns(i);
  }
  return upper_ns(kBuckets - 1);
}

double LatencyHistogram::mean_ns() const {
  return count_ == 0 ? 0.0 : static_cast<double>(sum_ns_) / static_cast<double>(count_);
}

}  // namespace trunkline
