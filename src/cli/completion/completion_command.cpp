#include "cli/completion/completion_command.h"

#include <fmt/format.h>

#include <iostream>
#include <memory>
#include <string>

#include "cli/completion/command_tree.h"
#include "cli/completion/shell_scripts.h"
#include "cli/exit_code.h"
#include "os/read_text.h"

namespace trunkline::cli {
namespace {

struct Arguments {
  std::string shell;
  std::string package;  // a file with the commands of the Python package
};

Status add_package(CommandInfo& tree, const std::string& file) {
  if (file.empty()) return {};
  const auto text = os::read_text(file);
  if (!text) return std::unexpected(text.error());
  const auto json = nlohmann::json::parse(*text, nullptr, false);
  return merge_commands(tree, json);
}

int run(const CLI::App& app, const Arguments& arguments) {
  CommandInfo tree = describe_app(app);
  if (auto added = add_package(tree, arguments.package); !added) {
    std::cerr << "trunkline completion: " << added.error().message << '\n';
    return kExitFailed;
  }
  if (arguments.shell == "bash")
    std::cout << bash_script(tree);
  else if (arguments.shell == "zsh")
    std::cout << zsh_script(tree);
  else
    std::cout << fish_script(tree);
  return std::cout.flush() ? kExitOk : kExitFailed;
}

std::string objection_to_shell(const std::string& shell) {
  if (shell == "bash" || shell == "zsh" || shell == "fish") return "";
  return fmt::format("\"{}\" is not one of bash, zsh, fish", shell);
}

}  // namespace

void add_completion(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* const command =
      app.add_subcommand("completion", "Print a script with which a shell completes command lines");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("SHELL", arguments->shell, "To use it in bash now: source <(trunkline completion bash)")
      ->type_name("bash|zsh|fish")
      ->check(CLI::Validator(objection_to_shell, ""))
      ->required();
  command->add_option("--package-commands", arguments->package)->group("");  // passed by the Python package
  command->callback(
      [arguments, &app, &chosen] { chosen = [arguments, &app] { return run(app, *arguments); }; });
}

}  // namespace trunkline::cli
