// Reports of what the parser rejects, and of exceptions that no command expected: a line on standard error,
// and with --json the same error object that the commands print for their own failures.
#pragma once

#include <CLI/CLI.hpp>
#include <exception>

namespace trunkline::cli {

// Returns the exit status: kExitOk after --help and --version, which CLI11 implements as exceptions.
int report_usage(const CLI::App& app, const CLI::ParseError& error, bool wants_json);

// For a command that only the Python package has.
int report_missing_package(const CLI::App& app, bool wants_json);

int report_exception(const CLI::App& app, const std::exception& error, bool wants_json);

}  // namespace trunkline::cli
