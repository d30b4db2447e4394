// `trunkline doctor`: what this machine, each filesystem and each device can do, and what to change.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace trunkline::cli {

// Adds the command to `app`. `chosen` is set to what the command does, returning its exit status, when it is
// named.
void add_doctor(CLI::App& app, std::function<int()>& chosen);

}  // namespace trunkline::cli
