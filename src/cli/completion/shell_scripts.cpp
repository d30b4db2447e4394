#include "cli/completion/shell_scripts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace trunkline::cli {
namespace {

void append_commands(const CommandInfo& command, const std::string& name, std::vector<NamedCommand>& found) {
  found.push_back({.name = name, .command = &command});
  for (const CommandInfo& each : command.commands) append_commands(each, name + " " + each.name, found);
}

}  // namespace

std::vector<NamedCommand> all_commands(const CommandInfo& program) {
  std::vector<NamedCommand> found;
  append_commands(program, program.name, found);
  return found;
}

std::string shell_quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string command_patterns(const std::vector<NamedCommand>& commands) {
  std::vector<std::string> patterns;
  for (std::size_t index = 1; index < commands.size(); ++index)
    patterns.push_back(shell_quoted(commands[index].name));
  return fmt::format("{}", fmt::join(patterns, "|"));
}

Cases make_cases(const std::vector<NamedCommand>& commands,
                 std::string (*case_of_option)(const NamedCommand&, const OptionInfo&),
                 std::string (*case_of_command)(const NamedCommand&)) {
  Cases cases;
  for (const NamedCommand& each : commands) {
    for (const OptionInfo& option : each.command->options)
      if (!option.value.empty()) cases.options += case_of_option(each, option);
    cases.commands += case_of_command(each);
  }
  return cases;
}

std::string option_patterns(const NamedCommand& command, const OptionInfo& option) {
  std::vector<std::string> patterns;
  for (const std::string& name : option.names) patterns.push_back(shell_quoted(command.name + " " + name));
  return fmt::format("{}", fmt::join(patterns, "|"));
}

}  // namespace trunkline::cli
