// `trunkline doctor`: what this machine, each filesystem and each device can do, and what to change.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace trunkline::cli {

// Adds the command to `app`. When the command is selected, `chosen` is set to a function that runs it and
// returns its exit status.
void add_doctor(CLI::App& app, std::function<int()>& chosen);

}  // namespace trunkline::cli
