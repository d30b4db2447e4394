// Compares two results of `bench --json`, row by row.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::cli {

// One value of a row that both results have.
struct BenchChange {
  std::string row;     // "write fresh"
  std::string metric;  // "gb_s", "latency_us.p99"
  double before = 0;
  double after = 0;
  double ratio = 0;     // after / before; 0 where `before` is 0
  bool judged = false;  // a speed, which must not become lower
  bool slower = false;  // by more than the limit
};

struct BenchDifference {
  std::vector<BenchChange> changes;
  std::vector<std::string> only_before;  // rows
  std::vector<std::string> only_after;
  std::vector<std::string> options;  // what was measured differently: "block_bytes: 1048576 -> 65536"

  bool any_slower() const;
};

// A speed is slower if it is below `before * (1 - fail_over)`; nothing is without `fail_over`. Fails with
// `format` on documents that are not results of bench, and with invalid_argument where no row is in both.
Result<BenchDifference> compare_benches(const nlohmann::ordered_json& before,
                                        const nlohmann::ordered_json& after, std::optional<double> fail_over);

// "5%" or "5", as a fraction.
Result<double> parse_fail_over(std::string_view text);

}  // namespace trunkline::cli
