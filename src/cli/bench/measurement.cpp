#include "cli/bench/measurement.h"

#include <fmt/format.h>

#include "cli/bench/statistics.h"

namespace trunkline::cli {

std::string Case::label() const {
  if (read_percent) return fmt::format("mixed {}/{}", *read_percent, 100 - *read_percent);
  return op == Op::read ? "read" : "write " + std::string(to_string(write_mode));
}

std::vector<Case> cases_of(const BenchOptions& options) {
  std::vector<Case> cases;
  if (options.read) cases.push_back({.op = Op::read});
  if (options.write) {
    for (const WriteMode mode : options.write_modes) cases.push_back({.op = Op::write, .write_mode = mode});
  }
  if (options.mix) cases.push_back({.op = Op::write, .read_percent = options.mix});
  return cases;
}

double Measurement::transfers_per_second() const {
  return ratio(static_cast<double>(transfers.stats.transfers), transfers.seconds);
}

double Measurement::bytes_per_second() const { return ratio(static_cast<double>(bytes), transfers.seconds); }

double Measurement::bytes_per_second_with_sync() const {
  return ratio(static_cast<double>(bytes), transfers.seconds + sync_seconds);
}

double Measurement::cpu_seconds_per_gb() const {
  return ratio(transfers.cpu_seconds, static_cast<double>(bytes) / static_cast<double>(kGB));
}

double Measurement::cpu_seconds_per_gb_with_sync() const {
  return ratio(transfers.cpu_seconds + sync_cpu_seconds,
               static_cast<double>(bytes) / static_cast<double>(kGB));
}

}  // namespace trunkline::cli
