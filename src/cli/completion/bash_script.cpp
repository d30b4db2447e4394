#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/completion/shell_scripts.h"

namespace trunkline::cli {
namespace {

// What can follow an option that has a value.
std::string bash_value_case(const NamedCommand& command, const OptionInfo& option) {
  const auto words = words_of_value(option.value);
  std::string action = ":";  // nothing to offer
  if (!words.empty())
    action = fmt::format("words={}", shell_quoted(fmt::format("{}", fmt::join(words, " "))));
  if (is_file_value(option.value)) action = "files=yes";
  return fmt::format("    {}) {} ;;\n", option_patterns(command, option), action);
}

std::string bash_command_case(const NamedCommand& named) {
  const CommandInfo& command = *named.command;
  std::vector<std::string> options;
  for (const OptionInfo& option : command.options)
    for (const std::string& name : option.names)
      if (name.starts_with("--")) options.push_back(name);
  std::vector<std::string> words;
  for (const CommandInfo& each : command.commands) words.push_back(each.name);
  for (const std::string& argument : command.arguments)
    std::ranges::copy(words_of_value(argument), std::back_inserter(words));
  return fmt::format("        {}) options={} words={}{} ;;\n", shell_quoted(named.name),
                     shell_quoted(fmt::format("{}", fmt::join(options, " "))),
                     shell_quoted(fmt::format("{}", fmt::join(words, " "))),
                     std::ranges::any_of(command.arguments, is_file_value) ? " files=yes" : "");
}

}  // namespace

std::string bash_script(const CommandInfo& program) {
  const auto commands = all_commands(program);
  const Cases cases = make_cases(commands, bash_value_case, bash_command_case);
  return fmt::format(R"(# Completion of {0} for bash; made by: {0} completion bash
_{0}() {{
  local command={0} index options= words= files=
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}}
  for ((index = 1; index < COMP_CWORD; index++)); do
    case "$command ${{COMP_WORDS[index]}}" in
      {1}) command+=" ${{COMP_WORDS[index]}}" ;;
    esac
  done
  # --option=value is three words
  [[ $current == = ]] && current=
  [[ $previous == = ]] && previous=${{COMP_WORDS[COMP_CWORD - 2]}}
  case "$command $previous" in
{2}    *)
      case "$command" in
{3}      esac
      [[ $current == -* ]] && words=$options files=
      ;;
  esac
  COMPREPLY=()
  [[ $words ]] && mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  if [[ $files ]]; then
    compopt -o filenames 2>/dev/null
    local file
    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$current")
  fi
}}
complete -F _{0} {0}
)",
                     program.name, command_patterns(commands), cases.options, cases.commands);
}

}  // namespace trunkline::cli
