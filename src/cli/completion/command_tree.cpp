#include "cli/completion/command_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace trunkline::cli {
namespace {

bool is_placeholder(std::string_view word) {  // the N of "cuda:N"
  return std::ranges::any_of(word, [](char c) { return c >= 'A' && c <= 'Z'; });
}

CommandInfo parse_command(const nlohmann::json& json) {
  CommandInfo command{.name = json.at("name"), .description = json.value("description", "")};
  for (const auto& each : json.value("options", nlohmann::json::array())) {
    command.options.push_back({.names = each.at("names"),
                               .value = each.value("value", ""),
                               .description = each.value("description", "")});
  }
  command.arguments = json.value("arguments", std::vector<std::string>{});
  for (const auto& each : json.value("commands", nlohmann::json::array()))
    command.commands.push_back(parse_command(each));
  return command;
}

void merge(CommandInfo& tree, CommandInfo package) {
  if (!package.options.empty() || !package.arguments.empty()) {
    tree.options = std::move(package.options);
    tree.arguments = std::move(package.arguments);
  }
  for (CommandInfo& each : package.commands) {
    const auto same = std::ranges::find(tree.commands, each.name, &CommandInfo::name);
    if (same == tree.commands.end())
      tree.commands.push_back(std::move(each));
    else
      merge(*same, std::move(each));
  }
}

}  // namespace

CommandInfo describe_app(const CLI::App& app) {
  CommandInfo command{.name = app.get_name(), .description = app.get_description()};
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    const std::string value = option->get_items_expected_max() == 0 ? "" : option->get_type_name();
    if (option->get_positional()) {
      command.arguments.push_back(value.empty() ? option->get_name(true) : value);
      continue;
    }
    OptionInfo info{.value = value, .description = option->get_description()};
    for (const std::string& name : option->get_lnames()) info.names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) info.names.push_back("-" + name);
    command.options.push_back(std::move(info));
  }
  for (const CLI::App* each :
       app.get_subcommands([](const CLI::App* sub) { return !sub->get_group().empty(); }))
    command.commands.push_back(describe_app(*each));
  return command;
}

Status merge_commands(CommandInfo& tree, const nlohmann::json& package) {
  try {
    merge(tree, parse_command(package));
    return {};
  } catch (const nlohmann::json::exception& error) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   fmt::format("cannot read the commands of the package: {}", error.what())));
  }
}

std::vector<std::string> words_of_value(std::string_view value) {
  std::vector<std::string> words;
  if (value.empty() || is_placeholder(value.substr(0, 1))) return words;
  while (true) {
    const auto bar = value.find('|');
    if (const std::string_view word = value.substr(0, bar); !is_placeholder(word)) words.emplace_back(word);
    if (bar == std::string_view::npos) return words;
    value.remove_prefix(bar + 1);
  }
}

bool is_file_value(std::string_view value) {
  if (const auto bar = value.rfind('|'); bar != std::string_view::npos) value.remove_prefix(bar + 1);
  constexpr std::array<std::string_view, 10> kFiles{"FILE", "DIR",    "PATH", "MODEL", "FOLDER",
                                                    "OUT",  "SOURCE", "A",    "B",     "NAME_OR_FILE"};
  return value.ends_with(".json") || std::ranges::find(kFiles, value) != kFiles.end();
}

}  // namespace trunkline::cli
