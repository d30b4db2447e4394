// The fio command line that does the same work as one of our rows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench/measurement.h"
#include "cli/bench/schedule.h"
#include "trunkline/engine.h"

namespace trunkline::cli {

struct FioJob {
  Case what;
  Order order = Order::sequential;
  std::vector<std::string> files;
  std::uint64_t file_bytes = 0;  // of each
  std::uint64_t block_bytes = 0;
  std::uint64_t least_block_bytes = 0;  // less than that: sizes are chosen at random; 0: all blocks are alike
  BackendKind backend = BackendKind::io_uring;
  unsigned lanes = 1;
  unsigned queue_depth = 1;
  bool direct = true;
  bool huge_pages = true;  // memory on huge pages where available, like the engine's own memory
  double duration_s = 0;
  std::optional<std::uint64_t> seed{};
};

// As many jobs as we have lanes, each with our queue depth, so that as many transfers are in flight; each has
// an equal share of every file. With pread and pwrite (the threads backend) a job has one transfer in flight,
// so there are more jobs.
std::vector<std::string> fio_command(const FioJob& job);

// A sentence for the reader of the results: in what the command matches ours, and in what it differs.
std::string fio_terms(const FioJob& job);

}  // namespace trunkline::cli
