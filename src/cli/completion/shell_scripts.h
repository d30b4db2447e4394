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

}  // namespace trunkline::cli
