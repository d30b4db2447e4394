#include "cli/bench/gdsio_peer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <ranges>
#include <system_error>

#include "cli/bench/child_process.h"
#include "cli/bench/statistics.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr const char* kInstalledPath = "/usr/local/cuda/gds/tools/gdsio";

// Of gdsio's options (https://docs.nvidia.com/gpudirect-storage/configuration-guide).
unsigned io_type(const GdsioJob& job) {
  return (job.what.writes() ? 1U : 0U) + (job.order == Order::random ? 2U : 0U);
}
unsigned transfer_type(const GdsioJob& job) { return job.cuda ? 0 : 1; }  // GPU direct, or the host's memory

std::uint64_t whole_blocks(const GdsioJob& job) { return job.file_bytes / job.block_bytes; }

unsigned threads_of(const GdsioJob& job) {
  const std::uint64_t blocks = std::max<std::uint64_t>(1, whole_blocks(job));
  return static_cast<unsigned>(std::min<std::uint64_t>(job.in_flight, blocks));
}

// The number after `name`, as in "Throughput: 2.75 GiB/sec".
std::optional<double> number_after(std::string_view line, std::string_view name) {
  const auto at = line.find(name);
  if (at == std::string_view::npos) return std::nullopt;
  line.remove_prefix(at + name.size());
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  double value = 0;
  const auto [end, code] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (code != std::errc() || !(value >= 0)) return std::nullopt;
  return value;
}

}  // namespace

std::vector<std::string> gdsio_command(const std::string& program, const GdsioJob& job) {
  std::vector<std::string> command{program, "-f", job.file};
  const auto set = [&](const char* name, std::string value) {
    command.emplace_back(name);
    command.push_back(std::move(value));
  };
  set("-d", std::to_string(job.cuda.value_or(0)));
  set("-w", std::to_string(threads_of(job)));
  set("-s", fmt::format("{}K", whole_blocks(job) * job.block_bytes / kKiB));
  set("-i", fmt::format("{}K", job.block_bytes / kKiB));
  set("-x", std::to_string(transfer_type(job)));
  set("-I", std::to_string(io_type(job)));
  if (job.duration_s > 0)
    set("-T", std::to_string(std::max(1L, std::lround(job.duration_s))));  // whole seconds
  return command;
}

std::string gdsio_terms(const GdsioJob& job) {
  return fmt::format(
      "gdsio ran {} threads of one transfer each, with blocks of {} bytes, O_DIRECT, and {}. It does not "
      "fsync, "
      "and is compared with ours without fsync; it reports no CPU time and no latency percentiles.",
      threads_of(job), job.block_bytes,
      job.cuda ? fmt::format("the memory of GPU {}, by GPUDirect Storage (-x 0)", *job.cuda)
               : "host memory (-x 1)");
}

// "IoType: READ XferType: GPUD Threads: 8 DataSetSize: 1022976/1048576(KiB) IOSize: 1024(KiB) Throughput:
// 2.758170 GiB/sec, Avg_Latency: 2841.5 usecs ops: 999 total_time 0.353 secs"
Result<GdsioMeasurement> parse_gdsio_output(std::string_view output) {
  for (const auto part : std::views::split(output, '\n')) {
    const std::string_view line(part.begin(), part.end());
    const auto gib_s = number_after(line, "Throughput:");
    const auto kib = number_after(line, "DataSetSize:");
    const auto operations = number_after(line, " ops:");
    const auto seconds = number_after(line, "total_time");
    if (!gib_s || !kib || !operations || !seconds) continue;
    return GdsioMeasurement{.command = {},
                            .bytes = static_cast<std::uint64_t>(*kib * static_cast<double>(kKiB)),
                            .bytes_per_second = *gib_s * static_cast<double>(kGiB),
                            .transfers_per_second = ratio(*operations, *seconds),
                            .latency_us_mean = number_after(line, "Avg_Latency:").value_or(0)};
  }
  return std::unexpected(make_error(
      ErrorKind::format, fmt::format("gdsio's output has no line with its throughput: {}", output)));
}

Result<GdsioPeer> GdsioPeer::find() {
  const char* const variable = std::getenv("PATH");  // NOLINT(concurrency-mt-unsafe)
  const std::string_view path = variable != nullptr ? variable : "";
  std::vector<std::string> candidates;
  for (const auto part : std::views::split(path, ':')) {
    const std::string_view directory(part.begin(), part.end());
    if (!directory.empty()) candidates.push_back(fmt::format("{}/gdsio", directory));
  }
  candidates.emplace_back(kInstalledPath);
  for (const std::string& candidate : candidates) {
    if (::access(candidate.c_str(), X_OK) == 0) return GdsioPeer(candidate);
  }
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format(
          "--compare gdsio: there is no gdsio in PATH, and no {}; it is in the package gds-tools of the "
          "CUDA toolkit: apt-get install gds-tools-12-8 (or another version) from NVIDIA's repository",
          kInstalledPath)));
}

Result<GdsioMeasurement> GdsioPeer::measure(const GdsioJob& job) const {
  const auto command = gdsio_command(program_, job);
  auto finished = run_to_end(command);
  if (!finished) return std::unexpected(finished.error());
  if (finished->status != 0) {
    return std::unexpected(
        make_error(ErrorKind::system,
                   fmt::format("gdsio ended with status {}: {}{}\nrun it by hand: {}", finished->status,
                               finished->errors, finished->output, fmt::join(command, " "))));
  }
  auto measurement = parse_gdsio_output(finished->output);
  if (measurement) measurement->command = command;
  return measurement;
}

}  // namespace trunkline::cli
