// Scripts with which shells complete a command line. They know all words: nothing is run at a TAB.
#pragma once

#include <string>

#include "cli/completion/command_tree.h"

namespace trunkline::cli {

std::string bash_script(const CommandInfo& program);
std::string zsh_script(const CommandInfo& program);
std::string fish_script(const CommandInfo& program);

// What the scripts have in common.

// A command of the tree with its full name: "trunkline checkpoint ls".
struct NamedCommand {
  std::string name;
  const CommandInfo* command = nullptr;
};
std::vector<NamedCommand> all_commands(const CommandInfo& program);

// In single quotes, as bash and zsh read it.
std::string shell_quoted(std::string_view text);

// "'trunkline doctor'|'trunkline bench'": a pattern of `case` for each command below the program.
std::string command_patterns(const std::vector<NamedCommand>& commands);

// "'trunkline bench --backend'|'trunkline bench --engine'".
std::string option_patterns(const NamedCommand& command, const OptionInfo& option);

// The arms of the two `case` statements in the scripts for bash and zsh: what can follow an option that has a
// value, and what belongs to a command.
struct Cases {
  std::string options;
  std::string commands;
};
Cases make_cases(const std::vector<NamedCommand>& commands,
                 std::string (*case_of_option)(const NamedCommand&, const OptionInfo&),
                 std::string (*case_of_command)(const NamedCommand&));

}  // namespace trunkline::cli
