#include "cli/checkpoint/checkpoint_command.h"

#include <memory>

#include "cli/checkpoint/checkpoint_actions.h"

namespace trunkline::cli {
namespace {

using Arguments = std::shared_ptr<CheckpointArguments>;

CLI::App* add_action(CLI::App& group, const Arguments& arguments, std::function<int()>& chosen,
                     const char* name, const char* description, int (*action)(const CheckpointArguments&)) {
  CLI::App* const command = group.add_subcommand(name, description);
  command->add_option("DIR", arguments->directory, "Directory of checkpoints")->required();
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->callback(
      [arguments, &chosen, action] { chosen = [arguments, action] { return action(*arguments); }; });
  return command;
}

}  // namespace

void add_checkpoint(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* const group = app.add_subcommand("checkpoint", "Look into directories of checkpoints");
  group->require_subcommand(1);
  const auto arguments = std::make_shared<CheckpointArguments>();
  const auto add = [&](const char* name, const char* description, int (*action)(const CheckpointArguments&)) {
    return add_action(*group, arguments, chosen, name, description, action);
  };
  add("ls", "List the checkpoints", list_checkpoints);
  CLI::App* const show = add("show", "Say what is in a checkpoint, and where", show_checkpoint);
  show->add_option("--step", arguments->step, "Its step [the latest]");
  CLI::App* const verify = add("verify", "Read checkpoints and compare every checksum", verify_checkpoints);
  CLI::Option* const step = verify->add_option("--step", arguments->step, "Its step [the latest]");
  verify->add_flag("--all", arguments->all, "Verify all steps")->excludes(step);
  CLI::App* const collect =
      add("gc", "Remove what saves that were cut off have left; never a checkpoint", collect_debris);
  collect->add_flag("--dry-run", arguments->dry_run, "Only say what would be removed");
}

}  // namespace trunkline::cli
