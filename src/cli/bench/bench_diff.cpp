#include "cli/bench/bench_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>

#include "cli/bench/statistics.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

// Where each value is in a row, as a JSON pointer, and whether it is a speed that is judged. Latencies and
// CPU time are shown only: with a full queue a latency follows from the speed, and both vary more.
struct Metric {
  const char* name;
  const char* pointer;
  bool judged;
};
constexpr std::array<Metric, 9> kMetrics{{{"gb_s", "/gb_s", true},
                                          {"gb_s_with_sync", "/gb_s_with_sync", true},
                                          {"reads.gb_s", "/reads/gb_s", true},
                                          {"writes.gb_s", "/writes/gb_s", true},
                                          {"iops", "/iops", false},
                                          {"cpu_s_per_gb", "/cpu_s_per_gb", false},
                                          {"latency_us.p50", "/latency_us/p50", false},
                                          {"latency_us.p99", "/latency_us/p99", false},
                                          {"latency_us.p99.9", "/latency_us/p99.9", false}}};

// Options that change what is measured.
constexpr std::array<const char*, 13> kOptions{
    "size_bytes", "block_bytes", "least_block_bytes", "mix",   "queue_depth", "lanes",
    "engine",     "device",      "duration_s",        "order", "memory",      "direct",
    "files"};

std::unexpected<Error> not_results(std::string_view which, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::format, fmt::format("{}: not a document of trunkline bench --json: {}", which, why)));
}

Status check(const Json& document, std::string_view which) {
  if (!document.is_object() || document.value("command", Json()) != "bench")
    return not_results(which, "it lacks \"command\": \"bench\"");
  if (document.value("schema", Json()) != 1) return not_results(which, "its schema is not 1");
  if (document.contains("error")) return not_results(which, "it holds an error instead of results");
  const Json rows = document.value("results", Json());
  if (!rows.is_array() || rows.empty()) return not_results(which, "it has no results");
  for (const Json& row : rows) {
    if (!row.is_object() || !row.contains("name") || !row["name"].is_string())
      return not_results(which, "a row has no name");
  }
  return {};
}

const Json* row_named(const Json& document, const std::string& name) {
  for (const Json& row : document["results"]) {
    if (row["name"] == name) return &row;
  }
  return nullptr;
}

std::vector<std::string> rows_only_in(const Json& document, const Json& other) {
  std::vector<std::string> names;
  for (const Json& row : document["results"]) {
    const auto name = row["name"].get<std::string>();
    if (row_named(other, name) == nullptr) names.push_back(name);
  }
  return names;
}

std::optional<double> value_at(const Json& row, const char* pointer) {
  const Json::json_pointer where(pointer);
  if (!row.contains(where) || !row[where].is_number()) return std::nullopt;
  return row[where].get<double>();
}

void compare_rows(const std::string& name, const Json& before, const Json& after,
                  std::optional<double> fail_over, std::vector<BenchChange>& changes) {
  for (const Metric& metric : kMetrics) {
    const auto old = value_at(before, metric.pointer);
    const auto now = value_at(after, metric.pointer);
    if (!old || !now) continue;
    changes.push_back({.row = name,
                       .metric = metric.name,
                       .before = *old,
                       .after = *now,
                       .ratio = ratio(*now, *old),
                       .judged = metric.judged,
                       .slower = metric.judged && fail_over && *now < *old * (1 - *fail_over)});
  }
}

std::vector<std::string> changed_options(const Json& before, const Json& after) {
  const Json old = before.value("options", Json::object());
  const Json now = after.value("options", Json::object());
  std::vector<std::string> changed;
  for (const char* name : kOptions) {
    const Json left = old.value(name, Json());
    const Json right = now.value(name, Json());
    if (left != right) changed.push_back(fmt::format("{}: {} -> {}", name, left.dump(), right.dump()));
  }
  return changed;
}

}  // namespace

bool BenchDifference::any_slower() const { return std::ranges::any_of(changes, &BenchChange::slower); }

Result<BenchDifference> compare_benches(const Json& before, const Json& after,
                                        std::optional<double> fail_over) {
  if (auto checked = check(before, "the first file"); !checked) return std::unexpected(checked.error());
  if (auto checked = check(after, "the second file"); !checked) return std::unexpected(checked.error());
  BenchDifference difference{.changes = {},
                             .only_before = rows_only_in(before, after),
                             .only_after = rows_only_in(after, before),
                             .options = changed_options(before, after)};
  for (const Json& row : before["results"]) {
    const auto name = row["name"].get<std::string>();
    const Json* const other = row_named(after, name);
    if (other != nullptr) compare_rows(name, row, *other, fail_over, difference.changes);
  }
  if (difference.changes.empty()) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   "the results have no row in common; compare runs with the same options"));
  }
  return difference;
}

Result<double> parse_fail_over(std::string_view text) {
  std::string_view digits = text;
  if (digits.ends_with('%')) digits.remove_suffix(1);
  double percent = 0;
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), percent);
  const bool is_in_range = percent >= 0 && percent < 100;  // false for NaN
  if (code != std::errc() || end != digits.data() + digits.size() || !is_in_range) {
    return std::unexpected(make_error(
        ErrorKind::invalid_argument,
        fmt::format("--fail-over: must be a percentage from 0% to less than 100%, such as 5%, not \"{}\"",
                    text)));
  }
  return percent / 100;
}

}  // namespace trunkline::cli
