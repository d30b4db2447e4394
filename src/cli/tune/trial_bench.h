// Measures candidates on scratch files: every pattern for a moment, with the same memory.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/bench/ring_shape.h"
#include "cli/tune/candidates.h"
#include "cli/tune/halving.h"
#include "cli/tune/scratch_files.h"
#include "trunkline/buffer.h"
#include "trunkline/engine.h"
#include "trunkline/file.h"

namespace trunkline::cli {

// The patterns, as tuning::pattern_name() numbers them.
struct TrialPattern {
  Op op;
  Order order;
};
TrialPattern pattern_at(std::size_t index);

// What random reads and writes transfer each: a compressed image, a row of records.
inline constexpr std::uint64_t kRandomBytes = 64 * 1024;

// Twice what an engine has in flight, in requests small enough for `bytes` over all files, and within
// `memory_bytes`.
RingShape trial_shape(const Candidate& candidate, Order order, std::uint64_t files, std::uint64_t bytes,
                      std::uint64_t memory_bytes);

class TrialBench {
 public:
  // `files` must outlive it. Allocates its memory.
  static Result<TrialBench> create(const ScratchFiles& files);

  // Writes the files up to `bytes` each, or as much as `most_s` suffice for. Calls `wrote` now and then.
  Status lay_out(const Candidate& candidate, std::uint64_t bytes, double most_s,
                 const std::function<void(std::uint64_t bytes_done)>& wrote);

  std::uint64_t file_bytes() const { return file_bytes_; }

  // Bytes per second of each pattern; of writes, with the time until they are durable. `cancelled` when the
  // user interrupts.
  Result<PatternRates> measure(const Candidate& candidate, double seconds);

 private:
  TrialBench(const ScratchFiles& files, Buffer memory) : files_(files), memory_(std::move(memory)) {}

  Result<std::vector<File>> open(const Engine& engine, Op op, bool direct) const;
  Result<double> measure_pattern(const Engine& engine, const Candidate& candidate, std::size_t pattern,
                                 double seconds);

  const ScratchFiles& files_;
  Buffer memory_;
  std::uint64_t file_bytes_ = 0;
  PatternRates fastest_{};      // so far: how much to transfer in a given time
  std::uint64_t position_ = 0;  // in the files, for sequential patterns: not the same bytes each time
  std::uint64_t seed_ = 1;
};

}  // namespace trunkline::cli
