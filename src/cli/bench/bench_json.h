// The results of a benchmark as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "cli/bench/measurement.h"
#include "cli/bench/options.h"

namespace trunkline::cli {

// Rates are medians over the runs, in 10^9 bytes per second; latencies are microseconds over all runs.
nlohmann::ordered_json bench_json(const BenchOptions& options, const BenchResults& results);

}  // namespace trunkline::cli
