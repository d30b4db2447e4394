// `trunkline tune`: its command-line options and its entry point.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace trunkline::cli {

// Adds the command to `app`. When the command is selected, `chosen` is set to a function that runs it and
// returns its exit status.
void add_tune(CLI::App& app, std::function<int()>& chosen);

}  // namespace trunkline::cli
