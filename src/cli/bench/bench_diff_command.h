// `trunkline bench diff`: its command-line options and its entry point.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace trunkline::cli {

// Adds the command to `bench`, as add_bench() does.
void add_bench_diff(CLI::App& bench, std::function<int()>& chosen);

}  // namespace trunkline::cli
