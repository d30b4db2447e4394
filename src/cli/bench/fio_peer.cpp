#include "cli/bench/fio_peer.h"

#include <fmt/format.h>

#include "cli/bench/child_process.h"
#include "cli/bench/fio_output.h"

namespace trunkline::cli {

Result<FioPeer> FioPeer::find() {
  auto finished = run_to_end({"fio", "--version"});
  if (!finished || finished->status != 0) {
    const std::string why = finished ? finished->errors : finished.error().message;
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format("--compare fio: fio cannot be run ({}); install it with: apt-get install fio", why)));
  }
  std::string version = finished->output;
  while (version.ends_with('\n')) version.pop_back();
  return FioPeer(std::move(version));
}

Result<FioMeasurement> FioPeer::measure(const FioJob& job) const {
  const auto command = fio_command(job);
  auto finished = run_to_end(command);
  if (!finished) return std::unexpected(finished.error());
  if (finished->status != 0) {
    return std::unexpected(make_error(
        ErrorKind::system, fmt::format("fio ended with status {}: {}\nrun it by hand: {}", finished->status,
                                       finished->errors, fmt::join(command, " "))));
  }
  auto measurement = parse_fio_output(finished->output, job.what);
  if (measurement) measurement->command = command;
  return measurement;
}

}  // namespace trunkline::cli
