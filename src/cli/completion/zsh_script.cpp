#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/completion/shell_scripts.h"

namespace trunkline::cli {
namespace {

std::string zsh_value_case(const NamedCommand& command, const OptionInfo& option) {
  const auto words = words_of_value(option.value);
  std::string action = ":";
  if (!words.empty()) action = fmt::format("compadd -- {}", fmt::join(words, " "));
  if (is_file_value(option.value)) action = "_files";
  return fmt::format("    ({}) {}; return ;;\n", option_patterns(command, option), action);
}

std::string described(const std::string& name, const std::string& description) {
  return shell_quoted(name + ":" + description);
}

std::string zsh_command_case(const NamedCommand& named) {
  const CommandInfo& command = *named.command;
  std::string text = fmt::format("    ({})\n", shell_quoted(named.name));
  for (const OptionInfo& option : command.options) {
    for (const std::string& name : option.names)
      text += fmt::format("      options+=({})\n", described(name, option.description));
  }
  for (const CommandInfo& each : command.commands)
    text += fmt::format("      commands+=({})\n", described(each.name, each.description));
  for (const std::string& argument : command.arguments) {
    for (const std::string& word : words_of_value(argument))
      text += fmt::format("      commands+=({})\n", shell_quoted(word));
    if (is_file_value(argument)) text += "      files=yes\n";
  }
  return text + "      ;;\n";
}

}  // namespace

std::string zsh_script(const CommandInfo& program) {
  const auto commands = all_commands(program);
  const Cases cases = make_cases(commands, zsh_value_case, zsh_command_case);
  return fmt::format(R"(#compdef {0}
# Completion of {0} for zsh; made by: {0} completion zsh
_{0}() {{
  local command={0} word files=
  local -a options commands
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "$command $word" in
      ({1}) command+=" $word" ;;
    esac
  done
  case "$command ${{words[CURRENT-1]}}" in
{2}  esac
  case "$command" in
{3}  esac
  if [[ ${{words[CURRENT]}} == -* ]]; then
    _describe -o option options
    return
  fi
  (( $#commands )) && _describe command commands
  [[ -n $files ]] && _files
}}
if [[ ${{zsh_eval_context[-1]}} == loadautofunc ]]; then
  _{0} "$@"
else
  compdef _{0} {0}
fi
)",
                     program.name, command_patterns(commands), cases.options, cases.commands);
}

}  // namespace trunkline::cli
