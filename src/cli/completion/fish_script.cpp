#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/completion/shell_scripts.h"

namespace trunkline::cli {
namespace {

// In single quotes, in which fish reads \\ and \'.
std::string fish_quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "'";
}

std::string option_line(const std::string& start, const OptionInfo& option) {
  std::string line = start;
  for (const std::string& name : option.names)
    line += name.starts_with("--") ? fmt::format(" -l {}", name.substr(2))
                                   : fmt::format(" -s {}", name.substr(1));
  const auto words = words_of_value(option.value);
  if (is_file_value(option.value))
    line += " -rF";
  else if (!words.empty())
    line += fmt::format(" -xa {}", fish_quoted(fmt::format("{}", fmt::join(words, " "))));
  else if (!option.value.empty())
    line += " -x";
  return fmt::format("{} -d {}\n", line, fish_quoted(option.description));
}

std::string command_lines(const std::string& program, const NamedCommand& named) {
  const std::string start = fmt::format("complete -c {} -n {}", program,
                                        fish_quoted(fmt::format("__{}_at {}", program, named.name)));
  std::string text;
  for (const OptionInfo& option : named.command->options) text += option_line(start, option);
  for (const CommandInfo& each : named.command->commands)
    text += fmt::format("{} -a {} -d {}\n", start, each.name, fish_quoted(each.description));
  for (const std::string& argument : named.command->arguments) {
    if (const auto words = words_of_value(argument); !words.empty())
      text += fmt::format("{} -a {}\n", start, fish_quoted(fmt::format("{}", fmt::join(words, " "))));
    if (is_file_value(argument)) text += start + " -F\n";
  }
  return text;
}

}  // namespace

std::string fish_script(const CommandInfo& program) {
  const auto commands = all_commands(program);
  std::vector<std::string> patterns;
  std::string lines;
  for (const NamedCommand& each : commands) {
    if (each.command != &program) patterns.push_back(fish_quoted(each.name));
    lines += command_lines(program.name, each);
  }
  return fmt::format(R"(# Completion of {0} for fish; made by: {0} completion fish
function __{0}_at
    set -l command {0}
    for word in (commandline -opc)[2..]
        switch "$command $word"
            case {1}
                set command "$command $word"
        end
    end
    test "$command" = "$argv"
end
complete -c {0} -f
{2})",
                     program.name, fmt::join(patterns, " "), lines);
}

}  // namespace trunkline::cli
