// Runs a benchmark: every row, repeatedly, each after its preparation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench/bench_files.h"
#include "cli/bench/fio_peer.h"
#include "cli/bench/gdsio_peer.h"
#include "cli/bench/latency_file.h"
#include "cli/bench/measurement.h"
#include "cli/bench/options.h"
#include "cli/bench/transfer_ring.h"
#include "cli/progress.h"

namespace trunkline::cli {

// What is run or written besides the measurements themselves.
struct BenchExtras {
  std::optional<FioPeer> fio{};
  std::optional<GdsioPeer> gdsio{};
  std::optional<LatencyFile> log{};
};

class BenchRun {
 public:
  // All arguments must outlive the run.
  BenchRun(const BenchOptions& options, const Engine& engine, BenchFiles& files, Progress& progress,
           BenchExtras& extras)
      : options_(options), engine_(engine), files_(files), progress_(progress), extras_(extras) {}

  // Each repetition covers all rows, and fio runs right after us in each row, so that a drift of the machine
  // affects all alike. `corrupt` names file and offset of the first wrong byte.
  Result<BenchResults> run();

 private:
  Status describe_paths(BenchResults& results);
  Status make_ring();
  Status run_case(unsigned repeat, CaseResult& result);
  FioJob fio_job(const Case& what) const;
  GdsioJob gdsio_job(const Case& what) const;
  Status run_peers(const std::string& label, CaseResult& result);
  template <class Peer, class Job>
  auto run_peer(const Peer& peer, const Case& what, const std::string& label, const Job& job);

  // Establishes what a row requires before it is measured.
  Status prepare(const Case& what);
  Status lay_out();
  Status learn_patterns();
  Status drop_page_cache();

  Result<std::vector<File>> open(Mode mode) const;
  std::vector<Schedule> schedules(const Case& what, bool endless) const;
  Result<Measurement> measure(const Case& what, const std::string& label);
  Status pass(const Case& what, std::span<const File> files, const std::string& label, Meter& meter,
              Measurement& measurement);
  Status sync(std::span<const File> files, Measurement& measurement) const;
  Status check_written(const Case& what, const std::string& label);

  void start_log() const;
  Content content_of(const Case& what) const;
  std::function<void(std::uint64_t)> shown(const std::string& label, double duration_s);
  bool by_duration(const Case& what) const;
  bool endless(const Case& what) const;

  const BenchOptions& options_;
  const Engine& engine_;
  BenchFiles& files_;
  Progress& progress_;
  BenchExtras& extras_;
  std::unique_ptr<TransferRing> ring_;
  RingShape shape_;
  bool direct_ = false;     // all paths support direct I/O
  std::uint64_t seed_ = 0;  // of the most recent content and order
};

}  // namespace trunkline::cli
