#include "cli/usage_errors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "cli/engine_json.h"
#include "cli/exit_code.h"
#include "cli/package_commands.h"
#include "cli/suggestion.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

// The names of the subcommands of `group`, of this program or of the Python package.
std::vector<std::string> subcommand_names(const CLI::App& group, bool of_package) {
  std::vector<std::string> names;
  for (const CLI::App* each : group.get_subcommands([](const CLI::App*) { return true; })) {
    if ((each->get_group() == kPackageGroup) == of_package) names.push_back(each->get_name());
  }
  return names;
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
    for (const std::string& name : each->get_lnames()) known.push_back("--" + name);
  }
  std::string text = fmt::format("unknown option '{}'", given);
  if (const auto meant = nearest_name(given, known)) text += fmt::format(". Did you mean '{}'?", *meant);
  return text;
}

// "doctor, bench, tune, checkpoint, or, of the Python package, pack, plan, workload"
std::string list_subcommands(const CLI::App& group) {
  std::string text = fmt::format("{}", fmt::join(subcommand_names(group, false), ", "));
  const auto more = subcommand_names(group, true);
  if (!more.empty()) text += fmt::format(", or, of the Python package, {}", fmt::join(more, ", "));
  return text;
}

// What other programs call a subcommand; empty if there is no such name.
std::string synonym(std::string_view given) {
  if (given == "list") return "ls";
  if (given == "ls") return "list";
  return given == "remove" || given == "delete" ? "rm" : "";
}

// `given`: what stands where a subcommand has to.
std::string describe_unknown_subcommand(const CLI::App& group, const std::string& given) {
  auto known = subcommand_names(group, false);
  std::ranges::copy(subcommand_names(group, true), std::back_inserter(known));
  std::string text = fmt::format("unknown subcommand '{}'", given);
  if (const std::string other = synonym(given); std::ranges::find(known, other) != known.end())
    return text + fmt::format(". Did you mean '{}'?", other);
  if (const auto meant = nearest_name(given, known))
    return text + fmt::format(". Did you mean '{}'?", *meant);
  return text + fmt::format("; there are {}", list_subcommands(group));
}

// CLI11 reports that something is required even where something unknown was given in its place.
std::string describe(const CLI::App& command, const CLI::ParseError& error) {
  const std::vector<std::string> left = command.remaining();
  const bool lacks_subcommand =
      dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && command.get_require_subcommand_min() > 0;
  const auto is_option = [](const std::string& each) { return each.starts_with('-') && each != "-"; };
  if (lacks_subcommand && !left.empty() && !is_option(left.front()))
    return describe_unknown_subcommand(command, left.front());
  if (const auto option = std::ranges::find_if(left, is_option); option != left.end())
    return describe_unknown_option(command, *option);
  if (lacks_subcommand) return fmt::format("a subcommand is required: one of {}", list_subcommands(command));
  // "--all excludes --step"
  const std::string_view what = error.what();
  constexpr std::string_view kExcludes = " excludes ";
  if (const auto middle = what.find(kExcludes);
      dynamic_cast<const CLI::ExcludesError*>(&error) != nullptr && middle != std::string_view::npos) {
    return fmt::format("{} and {} cannot be combined", what.substr(0, middle),
                       what.substr(middle + kExcludes.size()));
  }
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

int report_missing_package(const CLI::App& app, bool wants_json) {
  const std::string name = full_name(innermost(app));
  const std::string message = "requires the Python package: run the trunkline command that it installs";
  if (wants_json) print_document(app, make_error(ErrorKind::unsupported, message));
  std::cerr << fmt::format("{}: {}\n", name, message);
  return kExitUsage;
}

int report_exception(const CLI::App& app, const std::exception& error, bool wants_json) {
  if (wants_json) print_document(app, make_error(ErrorKind::system, error.what()));
  std::cerr << full_name(innermost(app)) << ": " << error.what() << '\n';
  return kExitFailed;
}

}  // namespace trunkline::cli
