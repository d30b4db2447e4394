// Runs gdsio, the benchmark of NVIDIA's GPUDirect Storage, for comparison on the same file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/measurement.h"
#include "cli/bench/schedule.h"
#include "trunkline/error.h"

namespace trunkline::cli {

struct GdsioJob {
  Case what;
  Order order = Order::sequential;
  std::string file;
  std::uint64_t file_bytes = 0;
  std::uint64_t block_bytes = 0;
  unsigned in_flight = 1;          // transfers, of all our lanes
  std::optional<unsigned> cuda{};  // the GPU whose memory is used; nullopt: host memory
  double duration_s = 0;
};

// A thread of gdsio has one transfer in flight, so it gets as many threads as we have transfers in flight.
std::vector<std::string> gdsio_command(const std::string& program, const GdsioJob& job);

// In what the command matches ours, and in what it differs.
std::string gdsio_terms(const GdsioJob& job);

// Parses the line of results that gdsio prints. Fails with `format` when there is none.
Result<GdsioMeasurement> parse_gdsio_output(std::string_view output);

class GdsioPeer {
 public:
  // Finds gdsio in PATH, or where CUDA's packages install it; else fails with unsupported and says how to
  // install it.
  static Result<GdsioPeer> find();

  Result<GdsioMeasurement> measure(const GdsioJob& job) const;

 private:
  explicit GdsioPeer(std::string program) : program_(std::move(program)) {}

  std::string program_;
};

}  // namespace trunkline::cli
