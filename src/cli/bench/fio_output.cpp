#include "cli/bench/fio_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/bench/statistics.h"

namespace trunkline::cli {
namespace {

// Adds what `job` moved in one direction; latencies are still weighted. Returns for how long, in seconds.
double add_direction(const nlohmann::json& part, FioMeasurement& total, double& weights) {
  total.bytes +=
      part.at("io_bytes")
          .get_ref<const std::uint64_t&>();  // get() would silently convert a value that does not fit
  const nlohmann::json& latency = part.at("clat_ns");
  const double weight = part.at("total_ios").get<double>();
  const nlohmann::json percentiles = latency.value("percentile", nlohmann::json::object());
  weights += weight;
  total.latency_us_mean += weight * latency.at("mean").get<double>() / 1e3;
  total.latency_us_p50 += weight * percentiles.value("50.000000", 0.0) / 1e3;
  total.latency_us_p99 += weight * percentiles.value("99.000000", 0.0) / 1e3;
  return part.at("runtime").get<double>() / 1e3;
}

FioMeasurement total_of(const nlohmann::json& jobs, const Case& what) {
  FioMeasurement total;
  double seconds = 0;
  double cpu_seconds = 0;
  double weights = 0;
  for (const nlohmann::json& job : jobs) {
    if (what.reads()) seconds = std::max(seconds, add_direction(job.at("read"), total, weights));
    if (what.writes()) seconds = std::max(seconds, add_direction(job.at("write"), total, weights));
    // usr_cpu and sys_cpu are percentages of job_runtime (fio's HOWTO, "Interpreting the output").
    const double cpu_percent = job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>();
    cpu_seconds += cpu_percent / 100 * job.at("job_runtime").get<double>() / 1e3;
  }
  total.bytes_per_second = ratio(static_cast<double>(total.bytes), seconds);
  total.transfers_per_second = ratio(weights, seconds);
  total.cpu_seconds_per_gb = ratio(cpu_seconds, static_cast<double>(total.bytes) / 1e9);
  total.latency_us_mean = ratio(total.latency_us_mean, weights);
  total.latency_us_p50 = ratio(total.latency_us_p50, weights);
  total.latency_us_p99 = ratio(total.latency_us_p99, weights);
  return total;
}

}  // namespace

Result<FioMeasurement> parse_fio_output(std::string_view json, const Case& what) {
  try {
    // Warnings may precede the document.
    const auto start = json.find('{');
    const nlohmann::json document =
        nlohmann::json::parse(start == std::string_view::npos ? json : json.substr(start));
    const nlohmann::json& jobs = document.at("jobs");
    for (const nlohmann::json& job : jobs) {
      const int code = static_cast<int>(job.at("error").get_ref<const std::int64_t&>());
      if (code != 0) {
        return std::unexpected(Error{
            .kind = ErrorKind::system,
            .code = code,
            .message = fmt::format("fio's job {} failed: {}", job.value("jobname", "?"), errno_reason(code)),
            .path = {}});
      }
    }
    return total_of(jobs, what);
  } catch (const nlohmann::json::exception& error) {
    return std::unexpected(make_error(
        ErrorKind::format, fmt::format("fio's output is not the JSON of fio 3: {}", error.what())));
  }
}

}  // namespace trunkline::cli
