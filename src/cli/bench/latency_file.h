// The file of `bench --log`: one line of CSV for each transfer, after a line that names the columns.
//
//   row,run,time_us,latency_us,operation,offset,bytes
//   read,1,0.000,85.321,read,0,1048576
//
// row and run name the measurement, as in the JSON document; time_us is when the transfer was sent, since the
// first one of the measurement was; latency_us lasts until its completion.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "io/lane/latency_log.h"
#include "trunkline/error.h"

namespace trunkline::cli {

// Latencies in nanoseconds, for exact percentiles.
struct Latencies {
  std::vector<std::uint64_t> reads;
  std::vector<std::uint64_t> writes;
};

// The value that `percent` (0 to 100) of `sorted` do not exceed (nearest rank); 0 for none.
std::uint64_t exact_percentile(const std::vector<std::uint64_t>& sorted, double percent);

class LatencyFile {
 public:
  // Replaces a file of that name.
  static Result<LatencyFile> create(const std::string& path);

  // How many transfers of one measurement can be kept in memory on this machine.
  static std::size_t most_transfers();

  // Writes the transfers of one measurement in the order in which they were sent, and adds their latencies to
  // `latencies`.
  Status add(const std::string& row, unsigned run, const std::vector<io::LatencyLog>& logs,
             Latencies& latencies);

 private:
  LatencyFile(std::string path, std::ofstream file) : path_(std::move(path)), file_(std::move(file)) {}

  std::string path_;
  std::ofstream file_;
};

}  // namespace trunkline::cli
