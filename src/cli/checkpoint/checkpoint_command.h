// `trunkline checkpoint`: what is in a directory of checkpoints, whether it is whole, and what may go.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace trunkline::cli {

// Adds the command to `app`. `chosen` is set to what the command does, returning its exit status, when it is
// named.
void add_checkpoint(CLI::App& app, std::function<int()>& chosen);

}  // namespace trunkline::cli
