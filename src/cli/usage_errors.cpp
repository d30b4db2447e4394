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

// Commands of the Python package beside those of `group`; its `trunkline` runs this program for all others.
const std::vector<std::string>& python_commands(const CLI::App& group) {
  static const std::vector<std::string> top{"pack", "plan", "workload"};
  static const std::vector<std::string> of_checkpoint{"export", "import", "rm", "diff"};
  static const std::vector<std::string> none;
  if (group.get_parent() == nullptr) return top;
  return group.get_name() == "checkpoint" ? of_checkpoint : none;
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

std::string describe_unknown_option(const CLI::App& command, const std::string& given) {
  std::vector<std::string> known;
  for (const CLI::Option* each : command.get_options()) {
    if (!each->get_lnames().empty()) known.push_back("--" + each->get_lnames().front());
  }
  std::string text = fmt::format("unknown option '{}'", given);
  if (const auto meant = nearest_name(given, known)) text += fmt::format(". Did you mean '{}'?", *meant);
  return text;
}

// "doctor, bench, tune, checkpoint, and with the Python package pack, plan, workload"
std::string subcommands_of(const CLI::App& group, std::vector<std::string> known) {
  std::string text = fmt::format("{}", fmt::join(known, ", "));
  const std::vector<std::string>& more = python_commands(group);
  if (!more.empty()) text += fmt::format(", and with the Python package {}", fmt::join(more, ", "));
  return text;
}

// `given`: what stands where a subcommand has to.
std::string describe_unknown_subcommand(const CLI::App& group, const std::string& given,
                                        std::vector<std::string> known) {
  std::string text =
      fmt::format("unknown subcommand '{}'; there are {}", given, subcommands_of(group, known));
  const std::vector<std::string>& more = python_commands(group);
  if (std::ranges::find(more, given) != more.end())
    return fmt::format("'{}' needs the Python package; run the trunkline that it installs", given);
  known.insert(known.end(), more.begin(), more.end());
  if (const auto meant = nearest_name(given, known)) text += fmt::format(". Did you mean '{}'?", *meant);
  return text;
}

// CLI11 reports that something is required even where something unknown was given in its place.
std::string describe(const CLI::App& command, const CLI::ParseError& error) {
  const std::vector<std::string> left = command.remaining();
  std::vector<std::string> known;
  for (const CLI::App* each : command.get_subcommands([](const CLI::App*) { return true; }))
    known.push_back(each->get_name());
  const bool lacks_subcommand = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !known.empty();
  const auto is_option = [](const std::string& each) { return each.starts_with('-') && each != "-"; };
  if (lacks_subcommand && !left.empty() && !is_option(left.front()))
    return describe_unknown_subcommand(command, left.front(), known);
  if (const auto option = std::ranges::find_if(left, is_option); option != left.end())
    return describe_unknown_option(command, *option);
  if (lacks_subcommand) return fmt::format("a subcommand is required: {}", subcommands_of(command, known));
  // "--size: 1 required TEXT missing"
  std::string text = error.what();
  const auto end_of_name = text.find(": 1 required ");
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr && end_of_name != std::string::npos)
    return fmt::format("{} requires a value", text.substr(0, end_of_name));
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !left.empty())
    return fmt::format("unexpected argument '{}'", left.front());
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
  const CLI::App& command = innermost(app);
  const std::string message = describe(command, error);
  if (wants_json) print_document(app, make_error(ErrorKind::invalid_argument, message));
  const std::string name = full_name(command);
  std::cerr << fmt::format("{}: {}\nSee {} --help.\n", name, message, name);
  return kExitUsage;
}

int report_exception(const CLI::App& app, const std::exception& error, bool wants_json) {
  if (wants_json) print_document(app, make_error(ErrorKind::system, error.what()));
  std::cerr << full_name(innermost(app)) << ": " << error.what() << '\n';
  return kExitFailed;
}

}  // namespace trunkline::cli
