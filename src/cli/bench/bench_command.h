// `trunkline bench`: its options on the command line, and what happens when it is called.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace trunkline::cli {

// Adds the command to `app`. `chosen` is set to what the command does, returning its exit status, when it is
// named.
void add_bench(CLI::App& app, std::function<int()>& chosen);

}  // namespace trunkline::cli
