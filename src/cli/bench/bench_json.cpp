#include "cli/bench/bench_json.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cli/bench/statistics.h"
#include "cli/engine_json.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kBytesPerGb = 1e9;

template <class Run, class Value>
double median_of(const std::vector<Run>& runs, Value value) {
  std::vector<double> values;
  values.reserve(runs.size());
  for (const Run& run : runs) values.push_back(value(run));
  return median(std::move(values));
}

Json options_json(const BenchOptions& options) {
  Json modes = Json::array();
  for (const WriteMode mode : options.write_modes) modes.push_back(to_string(mode));
  Json peers = Json::array();
  if (options.compare_fio) peers.push_back("fio");
  if (options.compare_gdsio) peers.push_back("gdsio");
  return {{"paths", options.paths},
          {"read", options.read},
          {"write", options.write},
          {"size_bytes", options.size_bytes ? Json(*options.size_bytes) : Json()},
          {"block_bytes", options.block_bytes},
          {"least_block_bytes", options.least_block_bytes ? Json(*options.least_block_bytes) : Json()},
          {"mix", options.mix ? Json(*options.mix) : Json()},
          {"seed", options.seed ? Json(*options.seed) : Json()},
          {"queue_depth", options.queue_depth ? Json(*options.queue_depth) : Json()},
          {"lanes", options.lanes ? Json(*options.lanes) : Json()},
          {"engine", to_string(options.backend)},
          {"device", device_name(options.cuda)},
          {"duration_s", options.duration_s},
          {"order", to_string(options.order())},
          {"files", options.files},
          {"verify", options.verify},
          {"repeat", options.repeat},
          {"memory", to_string(options.memory)},
          {"direct", to_string(options.direct)},
          {"write_mode", modes},
          {"compare", peers},
          {"log", options.log.empty() ? Json() : Json(options.log)},
          {"keep", options.keep}};
}

constexpr std::array<std::pair<const char*, double>, 6> kPercentiles{
    {{"p50", 50}, {"p90", 90}, {"p95", 95}, {"p99", 99}, {"p99.9", 99.9}, {"max", 100}}};

Json latency_json(const LatencyHistogram& histogram) {
  Json result{{"count", histogram.count()}, {"mean", histogram.mean_ns() / 1e3}, {"exact", false}};
  for (const auto& [name, percent] : kPercentiles)
    result[name] = static_cast<double>(histogram.percentile(percent)) / 1e3;
  return result;
}

// Of every transfer, which --log keeps.
Json latency_json(const std::vector<std::uint64_t>& sorted) {
  double sum = 0;
  for (const std::uint64_t each : sorted) sum += static_cast<double>(each);
  Json result{{"count", sorted.size()},
              {"mean", ratio(sum, static_cast<double>(sorted.size())) / 1e3},
              {"exact", true}};
  for (const auto& [name, percent] : kPercentiles)
    result[name] = static_cast<double>(exact_percentile(sorted, percent)) / 1e3;
  return result;
}

Json latency_json(const CaseResult& result, const EngineStats& stats, bool reads, bool writes) {
  if (result.latencies.reads.empty() && result.latencies.writes.empty()) {
    LatencyHistogram sum;
    if (reads) sum.add(stats.read_latency);
    if (writes) sum.add(stats.write_latency);
    return latency_json(sum);
  }
  std::vector<std::uint64_t> sorted;
  if (reads) sorted = result.latencies.reads;
  if (writes) sorted.insert(sorted.end(), result.latencies.writes.begin(), result.latencies.writes.end());
  std::ranges::sort(sorted);
  return latency_json(sorted);
}

// The reads, or the writes, of a mixed row.
Json part_json(const CaseResult& result, const EngineStats& stats, bool reads) {
  const auto per_second = [&](const Measurement& run) {
    const std::uint64_t bytes = reads ? run.bytes_read : run.bytes - run.bytes_read;
    return ratio(static_cast<double>(bytes), run.transfers.seconds);
  };
  const auto iops = [&](const Measurement& run) {
    const EngineStats& counts = run.transfers.stats;
    const auto& latency = reads ? counts.read_latency : counts.write_latency;
    return ratio(static_cast<double>(latency.count()), run.transfers.seconds);
  };
  return {{"gb_s", median_of(result.runs, per_second) / kBytesPerGb},
          {"iops", median_of(result.runs, iops)},
          {"latency_us", latency_json(result, stats, reads, !reads)}};
}

Json run_json(const Measurement& run, bool writes, const BenchOptions& options) {
  Json result{{"bytes", run.bytes},
              {"seconds", run.transfers.seconds},
              {"gb_s", run.bytes_per_second() / kBytesPerGb},
              {"iops", run.transfers_per_second()},
              {"cpu_s_per_gb", run.cpu_seconds_per_gb()}};
  if (writes) {
    result["sync_seconds"] = run.sync_seconds;
    result["gb_s_with_sync"] = run.bytes_per_second_with_sync() / kBytesPerGb;
    result["cpu_s_per_gb_with_sync"] = run.cpu_seconds_per_gb_with_sync();
  }
  result["per_path"] = Json::array();
  for (std::size_t path = 0; path < run.paths.size(); ++path) {
    const PathShare& share = run.paths[path];
    result["per_path"].push_back(
        {{"path", options.paths[path]},
         {"bytes", share.bytes},
         {"seconds", share.seconds},
         {"gb_s", ratio(static_cast<double>(share.bytes), share.seconds) / kBytesPerGb}});
  }
  return result;
}

Json fio_json(const CaseResult& result) {
  const bool writes = result.what.op == Op::write;
  const double gb_s =
      median_of(result.fio, [](const FioMeasurement& run) { return run.bytes_per_second; }) / kBytesPerGb;
  const double cpu = median_of(result.fio, [](const FioMeasurement& run) { return run.cpu_seconds_per_gb; });
  const double ours_gb_s =
      median_of(result.runs,
                [&](const Measurement& run) {
                  return writes ? run.bytes_per_second_with_sync() : run.bytes_per_second();
                }) /
      kBytesPerGb;
  const double ours_cpu = median_of(result.runs, [&](const Measurement& run) {
    return writes ? run.cpu_seconds_per_gb_with_sync() : run.cpu_seconds_per_gb();
  });
  Json runs = Json::array();
  for (const FioMeasurement& run : result.fio) {
    runs.push_back(
        {{"bytes", run.bytes},
         {"gb_s", run.bytes_per_second / kBytesPerGb},
         {"iops", run.transfers_per_second},
         {"cpu_s_per_gb", run.cpu_seconds_per_gb},
         {"latency_us",
          {{"mean", run.latency_us_mean}, {"p50", run.latency_us_p50}, {"p99", run.latency_us_p99}}}});
  }
  const double iops =
      median_of(result.fio, [](const FioMeasurement& run) { return run.transfers_per_second; });
  return {{writes ? "gb_s_with_sync" : "gb_s", gb_s},
          {"iops", iops},
          {"cpu_s_per_gb", cpu},
          {"ratio_gb_s", ratio(ours_gb_s, gb_s)},
          {"ratio_cpu_s_per_gb", ratio(ours_cpu, cpu)},
          {"command", result.fio.front().command},
          {"runs", runs}};
}

Json gdsio_json(const CaseResult& result) {
  const double bytes_per_second =
      median_of(result.gdsio, [](const GdsioMeasurement& run) { return run.bytes_per_second; });
  const double ours = median_of(result.runs, [](const Measurement& run) { return run.bytes_per_second(); });
  Json runs = Json::array();
  for (const GdsioMeasurement& run : result.gdsio) {
    runs.push_back({{"bytes", run.bytes},
                    {"gb_s", run.bytes_per_second / kBytesPerGb},
                    {"iops", run.transfers_per_second},
                    {"latency_us", {{"mean", run.latency_us_mean}}}});
  }
  return {
      {"gb_s", bytes_per_second / kBytesPerGb},
      {"iops", median_of(result.gdsio, [](const GdsioMeasurement& run) { return run.transfers_per_second; })},
      {"ratio_gb_s", ratio(ours, bytes_per_second)},
      {"command", result.gdsio.front().command},
      {"runs", runs}};
}

std::string_view operation_of(const Case& what) {
  if (what.read_percent) return "mixed";
  return what.writes() ? "write" : "read";
}

Json case_json(const CaseResult& result, const BenchOptions& options) {
  const bool writes = result.what.op == Op::write;
  EngineStats stats;
  Json runs = Json::array();
  for (const Measurement& run : result.runs) {
    accumulate(stats, run.transfers.stats);
    runs.push_back(run_json(run, writes, options));
  }
  Json row{
      {"name", result.what.label()},
      {"operation", operation_of(result.what)},
      {"read_percent", result.what.read_percent ? Json(*result.what.read_percent) : Json()},
      {"write_mode", writes ? Json(to_string(result.what.write_mode)) : Json()},
      {"order", to_string(options.order())},
      {"gb_s",
       median_of(result.runs, [](const Measurement& run) { return run.bytes_per_second(); }) / kBytesPerGb},
      {"iops", median_of(result.runs, [](const Measurement& run) { return run.transfers_per_second(); })},
      {"cpu_s_per_gb",
       median_of(result.runs, [](const Measurement& run) { return run.cpu_seconds_per_gb(); })}};
  if (writes) {
    row["gb_s_with_sync"] =
        median_of(result.runs, [](const Measurement& run) { return run.bytes_per_second_with_sync(); }) /
        kBytesPerGb;
    row["cpu_s_per_gb_with_sync"] =
        median_of(result.runs, [](const Measurement& run) { return run.cpu_seconds_per_gb_with_sync(); });
  }
  row["latency_us"] = latency_json(result, stats, result.what.reads(), writes);
  if (result.what.read_percent) {
    row["reads"] = part_json(result, stats, true);
    row["writes"] = part_json(result, stats, false);
  }
  row["bytes_by_path"] = {{"direct", stats.bytes_direct},
                          {"bounced", stats.bytes_bounced},
                          {"buffered", stats.bytes_buffered},
                          {"gds", stats.bytes_gds}};
  row["operations"] = stats.operations;
  row["transfers"] = stats.transfers;
  row["inline_operations"] = stats.inline_operations;
  row["retries"] = stats.retries;
  row["short_resumes"] = stats.short_resumes;
  row["direct_refusals"] = stats.direct_refusals;
  row["peak_pinned_bytes"] = stats.peak_pinned_bytes;
  row["verified"] = result.verified;
  row["runs"] = runs;
  if (!result.fio.empty()) row["fio"] = fio_json(result);
  if (!result.gdsio.empty()) row["gdsio"] = gdsio_json(result);
  return row;
}

}  // namespace

Json bench_json(const BenchOptions& options, const BenchResults& results) {
  Json document{{"command", "bench"}, {"schema", 1}, {"options", options_json(options)}};
  document["engine"] = config_json(results.config);
  document["direct"] = results.direct;
  document["paths"] = Json::array();
  for (const PathResult& path : results.paths) {
    document["paths"].push_back({{"path", path.path},
                                 {"existing", path.existing},
                                 {"files", path.files},
                                 {"file_bytes", path.file_bytes},
                                 {"explain", explanation_json(path.explanation)}});
  }
  document["results"] = Json::array();
  for (const CaseResult& result : results.cases) document["results"].push_back(case_json(result, options));
  if (!results.fio_version.empty())
    document["fio"] = {{"version", results.fio_version}, {"terms", results.fio_terms}};
  if (!results.gdsio_terms.empty()) document["gdsio"] = {{"terms", results.gdsio_terms}};
  return document;
}

}  // namespace trunkline::cli
