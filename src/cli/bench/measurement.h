// The measurements of a benchmark.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/latency_file.h"
#include "cli/bench/meter.h"
#include "cli/bench/options.h"
#include "trunkline/engine.h"

namespace trunkline::cli {

// One row of the results: reading, writing in one mode, or both mixed, which overwrites.
struct Case {
  Op op = Op::read;                             // of mixed: write
  WriteMode write_mode = WriteMode::overwrite;  // of writes
  std::optional<unsigned> read_percent{};       // of mixed reads and writes

  bool reads() const { return op == Op::read || read_percent; }
  bool writes() const { return op == Op::write; }
  std::string label() const;
};

// The rows that `options` select, reading first.
std::vector<Case> cases_of(const BenchOptions& options);

// One of the paths within a measurement.
struct PathShare {
  std::uint64_t bytes = 0;
  double seconds = 0;  // until the path's last completion
};

struct Measurement {
  std::uint64_t bytes = 0;
  std::uint64_t bytes_read = 0;  // the others were written
  Usage transfers;               // until the last completion
  double sync_seconds = 0;       // fsync of all files together, after that
  double sync_cpu_seconds = 0;
  std::vector<PathShare> paths;      // one for each of BenchOptions::paths
  std::vector<io::LatencyLog> logs;  // with --log, until they are written

  double transfers_per_second() const;
  double bytes_per_second() const;
  double bytes_per_second_with_sync() const;
  double cpu_seconds_per_gb() const;
  double cpu_seconds_per_gb_with_sync() const;
};

struct FioMeasurement {
  std::vector<std::string> command;
  std::uint64_t bytes = 0;
  double transfers_per_second = 0;
  double bytes_per_second = 0;    // of writes: with the final fsync
  double cpu_seconds_per_gb = 0;  // user and system time of fio's jobs
  double latency_us_mean = 0;     // completion latency
  double latency_us_p50 = 0;
  double latency_us_p99 = 0;
};

struct GdsioMeasurement {
  std::vector<std::string> command;
  std::uint64_t bytes = 0;
  double bytes_per_second = 0;  // of writes: without fsync
  double transfers_per_second = 0;
  double latency_us_mean = 0;
};

struct CaseResult {
  Case what;
  std::vector<Measurement> runs{};
  std::vector<FioMeasurement> fio{};      // one after each of our runs
  std::vector<GdsioMeasurement> gdsio{};  // likewise
  bool verified = false;                  // every byte was compared
  Latencies latencies{};                  // of all transfers of all runs, sorted; empty without --log
};

struct PathResult {
  std::string path;
  bool existing = false;
  std::vector<std::string> files{};
  std::uint64_t file_bytes = 0;  // of each
  Explanation explanation;
};

struct BenchResults {
  std::vector<PathResult> paths;
  EngineConfig config;
  bool direct = false;  // how the files were opened: direct I/O on all paths
  std::vector<CaseResult> cases;
  std::string fio_version;  // empty: fio was not run
  std::string fio_terms;    // what matched our run, and what differed
  std::string gdsio_terms;  // empty: gdsio was not run
};

}  // namespace trunkline::cli
