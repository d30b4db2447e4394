// Counters of one lane, or of all inline callers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "io/lane/latency_log.h"
#include "io/lane/reads_in_flight.h"
#include "io/lane/transfer.h"
#include "trunkline/stats.h"

namespace trunkline::io {

class Counters {
 public:
  void count_completion(const Transfer& transfer, const Outcome& outcome, std::uint64_t took_ns);
  // `path`: Transfer::effective_path().
  void count_payload(IoPath path, std::uint64_t bytes);
  void count_operation(bool failed, bool inlined);
  void add_to(EngineStats& sum) const;

  // From now on also keeps the latency of each transfer, of up to `most`.
  void start_latency_log(std::size_t most);
  LatencyLog take_latency_log();  // and keeps none any more; empty where none was kept

  // From now on, a time of CLOCK_MONOTONIC, also keeps how many reads are in flight.
  void start_reads_in_flight(std::int64_t now);
  // Keeps it no longer. Reads that have not ended by now are missing; nullopt where it was not kept.
  std::optional<ReadsInFlight> take_reads_in_flight();

 private:
  mutable std::mutex mutex_;
  EngineStats stats_;
  std::optional<LatencyLog> latencies_;
  std::optional<ReadsInFlight> reads_in_flight_;
};

}  // namespace trunkline::io
