// The latency of every single transfer, for exact percentiles: histograms (trunkline/stats.h) are within
// 1/16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trunkline/engine.h"

namespace trunkline::io {

struct LatencyRecord {
  std::uint64_t submitted_ns = 0;  // of CLOCK_MONOTONIC
  std::uint64_t took_ns = 0;
  std::uint64_t offset = 0;  // of the payload, in the file
  std::uint64_t bytes = 0;
  Op op = Op::read;
};

// Grows in pieces, so that no record waits for others to be copied. Not synchronised.
class LatencyLog {
 public:
  // Keeps up to `most` records; later ones are only counted.
  explicit LatencyLog(std::size_t most) : most_(most) {}

  void add(const LatencyRecord& record) {
    if (count_ == most_) {
      ++dropped_;
      return;
    }
    if (count_ % kPiece == 0) pieces_.emplace_back().reserve(kPiece);
    pieces_.back().push_back(record);
    ++count_;
  }

  std::size_t count() const { return count_; }
  std::uint64_t dropped() const { return dropped_; }
  const std::vector<std::vector<LatencyRecord>>& pieces() const { return pieces_; }

 private:
  static constexpr std::size_t kPiece = 1 << 14;
  std::size_t most_;
  std::size_t count_ = 0;
  std::uint64_t dropped_ = 0;
  std::vector<std::vector<LatencyRecord>> pieces_;
};

}  // namespace trunkline::io
