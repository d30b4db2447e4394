// `trunkline completion`: scripts with which shells complete command lines.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace trunkline::cli {

// Adds the command; parsing it sets `chosen` to what runs it.
void add_completion(CLI::App& app, std::function<int()>& chosen);

}  // namespace trunkline::cli
