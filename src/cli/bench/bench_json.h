// The results of a benchmark as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "cli/bench/measurement.h"
#include "cli/bench/options.h"

namespace trunkline::cli {

// Rates are bytes / 10^9 per second and medians of the runs; latencies are microseconds over all runs.
nlohmann::ordered_json bench_json(const BenchOptions& options, const BenchResults& results);

}  // namespace trunkline::cli
