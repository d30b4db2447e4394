#include "cli/usage_errors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "cli/engine_json.h"
#include "cli/exit_code.h"
#include "cli/suggestion.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

// Commands of the Python package, whose `trunkline` runs this program for all others.
const std::vector<std::string>& python_commands() {
  static const std::vector<std::string> commands{"pack", "plan", "workload"};
  return commands;
}

// The subcommand that parsing arrived at, or the app.
const CLI::App& innermost(const CLI::App& app) {
  const CLI::App* group = &app;
  while (!group->get_subcommands().empty()) group = group->get_subcommands().front();
  return *group;
}

// "trunkline checkpoint verify"
std::string full_name(const CLI::App& command) {
  const CLI::App* const parent = command.get_parent();
  return parent == nullptr ? command.get_name() : full_name(*parent) + " " + command.get_name();
}

// CLI11 reports that a subcommand is required even where an unknown one was given. None where none was given.
std::optional<std::string> describe_unknown_subcommand(const CLI::App& app) {
  const CLI::App& group = innermost(app);
  const std::vector<std::string> left = group.remaining();
  std::vector<std::string> known;
  for (const CLI::App* each : group.get_subcommands([](const CLI::App*) { return true; }))
    known.push_back(each->get_name());
  if (left.empty() || known.empty()) return std::nullopt;
  const std::string& given = left.front();
  if (given.starts_with('-')) return fmt::format("unknown option '{}'", given);
  std::string text = fmt::format("unknown subcommand '{}'; there are {}", given, fmt::join(known, ", "));
  if (group.get_parent() == nullptr) {
    const std::vector<std::string>& more = python_commands();
    if (std::ranges::find(more, given) != more.end())
      return fmt::format("'{}' needs the Python package; run the trunkline that it installs", given);
    text += fmt::format(", and with the Python package {}", fmt::join(more, ", "));
    known.insert(known.end(), more.begin(), more.end());
  }
  if (const auto meant = nearest_name(given, known)) text += fmt::format(". Did you mean '{}'?", *meant);
  return text;
}

void print_document(const CLI::App& app, const Error& error) {
  std::string command = full_name(innermost(app));
  if (command != app.get_name()) command.erase(0, app.get_name().size() + 1);
  const Json document{{"command", command}, {"schema", 1}, {"error", error_json(error)}};
  std::cout << document.dump(2, ' ', false, Json::error_handler_t::replace) << '\n' << std::flush;
}

}  // namespace

int report_usage(const CLI::App& app, const CLI::ParseError& error, bool wants_json) {
  if (error.get_exit_code() == 0) return app.exit(error) == 0 ? kExitOk : kExitFailed;
  const bool lacks = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  const std::optional<std::string> unknown = lacks ? describe_unknown_subcommand(app) : std::nullopt;
  if (wants_json)
    print_document(app, make_error(ErrorKind::invalid_argument, unknown.value_or(error.what())));
  if (unknown) {
    std::cerr << full_name(innermost(app)) << ": " << *unknown << '\n';
  } else {
    app.exit(error);
  }
  return kExitUsage;
}

int report_exception(const CLI::App& app, const std::exception& error, bool wants_json) {
  if (wants_json) print_document(app, make_error(ErrorKind::system, error.what()));
  std::cerr << full_name(innermost(app)) << ": " << error.what() << '\n';
  return kExitFailed;
}

}  // namespace trunkline::cli
