// Counters of an engine, and the distribution of its transfer latencies.
#pragma once

#include <array>
#include <cstdint>

namespace trunkline {

// Counts durations in logarithmic buckets, 16 per power of two of nanoseconds, so a percentile is accurate to
// within 1/16 (like fio's clat percentiles, which use 64).
class LatencyHistogram {
 public:
  static constexpr unsigned kSubBuckets = 16;
  static constexpr unsigned kBuckets = 60 * kSubBuckets;

  void add(std::uint64_t ns);
  void add(const LatencyHistogram& other);       // merges
  void subtract(const LatencyHistogram& other);  // leaves what was added after `other` was copied
  std::uint64_t count() const { return count_; }

  // Nanoseconds that `percent` (0 .. 100) of all durations did not exceed; 0 when empty.
  std::uint64_t percentile(double percent) const;
  double mean_ns() const;

 private:
  std::array<std::uint64_t, kBuckets> buckets_{};
  std::uint64_t count_ = 0;
  std::uint64_t sum_ns_ = 0;
};

struct EngineStats {
  // Payload bytes by I/O path. direct: the device moved them from or to the caller's memory; bounced: direct
  // I/O through a buffer of the engine; buffered: through the page cache; gds: GPUDirect Storage.
  std::uint64_t bytes_direct = 0;
  std::uint64_t bytes_bounced = 0;
  std::uint64_t bytes_buffered = 0;
  std::uint64_t bytes_gds = 0;
  std::uint64_t operations = 0;         // completed, including failed ones
  std::uint64_t transfers = 0;          // commands that completed
  std::uint64_t inline_operations = 0;  // done on the caller's thread
  std::uint64_t retries = 0;            // after EINTR or EAGAIN
  std::uint64_t short_resumes = 0;      // transfers continued after a short result
  std::uint64_t direct_refusals =
      0;                     // transfers repeated through the page cache after direct I/O was rejected
  std::uint64_t errors = 0;  // operations that failed
  std::uint64_t pinned_bytes = 0;
  std::uint64_t peak_pinned_bytes = 0;
  LatencyHistogram read_latency;  // of transfers, from sending to completion
  LatencyHistogram write_latency;
};

}  // namespace trunkline
