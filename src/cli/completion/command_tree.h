// The commands of a program, with their options and arguments: what completion scripts are made from.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::cli {

struct OptionInfo {
  std::vector<std::string> names = {};  // "--backend", "--engine"
  std::string value = {};               // "FILE", "auto|always|never"; empty for a flag
  std::string description = {};
};

struct CommandInfo {
  std::string name = {};
  std::string description = {};
  std::vector<OptionInfo> options = {};
  std::vector<std::string> arguments = {};  // "DIR", "bash|zsh|fish"
  std::vector<CommandInfo> commands = {};
};

// What CLI11 parses, without hidden options and commands.
CommandInfo describe_app(const CLI::App& app);

// Adds commands of the Python package to the tree. `package` has the members of CommandInfo; a command that
// is in both is described by `package`.
Status merge_commands(CommandInfo& tree, const nlohmann::json& package);

// What can be completed in the place of a value: "auto|always" gives its words, FILE and DIR file names, N
// nothing; "unet3d|bert|FILE" gives both.
std::vector<std::string> words_of_value(std::string_view value);
bool is_file_value(std::string_view value);

}  // namespace trunkline::cli
