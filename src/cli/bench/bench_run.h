// Runs a benchmark: every row, repeatedly, each after its preparation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench/bench_files.h"
#include "cli/bench/fio_peer.h"
#include "cli/bench/measurement.h"
#include "cli/bench/options.h"
#include "cli/bench/transfer_ring.h"
#include "cli/progress.h"

namespace trunkline::cli {

class BenchRun {
 public:
  // All arguments must outlive the run. `fio`: nullptr without a peer.
  BenchRun(const BenchOptions& options, const Engine& engine, BenchFiles& files, Progress& progress,
           const FioPeer* fio)
      : options_(options), engine_(engine), files_(files), progress_(progress), fio_(fio) {}

  // Each repetition covers all rows, and fio runs right after us in each row, so that a drift of the machine
  // affects all alike. `corrupt` names file and offset of the first wrong byte.
  Result<BenchResults> run();

 private:
  Status describe_paths(BenchResults& results);
  Status make_ring();
  Status run_case(unsigned repeat, CaseResult& result);
  FioJob fio_job(const Case& what) const;
  Result<FioMeasurement> run_fio(const Case& what);

  // Establishes what a row requires before it is measured.
  Status prepare(const Case& what);
  Status lay_out();
  Status learn_patterns();
  Status drop_page_cache();

  Result<std::vector<File>> open(Mode mode) const;
  std::vector<Schedule> schedules(bool endless);
  Result<Measurement> measure(const Case& what, const std::string& label);
  Status pass(const Case& what, std::span<const File> files, const std::string& label, Meter& meter,
              Measurement& measurement);
  Status sync(std::span<const File> files, Measurement& measurement) const;
  Status check_written(const std::string& label);

  Content made_content() const;
  Content checked_content() const;
  std::function<void(std::uint64_t)> shown(const std::string& label, double duration_s);
  bool by_duration(const Case& what) const;
  bool endless(const Case& what) const;

  const BenchOptions& options_;
  const Engine& engine_;
  BenchFiles& files_;
  Progress& progress_;
  const FioPeer* fio_;
  std::unique_ptr<TransferRing> ring_;
  RingShape shape_;
  bool direct_ = false;     // all paths support direct I/O
  std::uint64_t seed_ = 0;  // of the most recent content and order
};

}  // namespace trunkline::cli
