#include "cli/checkpoint/checkpoint_command.h"

#include <memory>
#include <string>

#include "checkpoint/manifest.h"
#include "cli/checkpoint/checkpoint_actions.h"
#include "cli/package_commands.h"
#include "cli/whole_number.h"

namespace trunkline::cli {
namespace {

using Arguments = std::shared_ptr<CheckpointArguments>;

CLI::App* add_action(CLI::App& group, const Arguments& arguments, std::function<int()>& chosen,
                     const char* name, const char* description, int (*action)(const CheckpointArguments&)) {
  CLI::App* const command = group.add_subcommand(name, description);
  command->add_option("DIR", arguments->directory, "Directory of checkpoints")->type_name("")->required();
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->callback(
      [arguments, &chosen, action] { chosen = [arguments, action] { return action(*arguments); }; });
  return command;
}

std::string objection_to_step(const std::string& text) {
  return objection_to_number(text, 0, checkpoint::kMaxNumber, "2^63 - 1");
}

CLI::Option* add_step(CLI::App& command, const Arguments& arguments, const char* description) {
  return command.add_option("--step", arguments->step, description)
      ->type_name("N")
      ->check(CLI::Validator(objection_to_step, ""));
}

}  // namespace

void add_checkpoint(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* const group =
      app.add_subcommand("checkpoint", "List, verify, export, import, compare and remove checkpoints");
  group->require_subcommand(1);
  const auto arguments = std::make_shared<CheckpointArguments>();
  const auto add = [&](const char* name, const char* description, int (*action)(const CheckpointArguments&)) {
    return add_action(*group, arguments, chosen, name, description, action);
  };
  add("ls", "List the checkpoints", list_checkpoints);
  CLI::App* const show =
      add("show", "Show the tensors and shards of a checkpoint, and where they are stored", show_checkpoint);
  add_step(*show, arguments, "Step to show (default: the latest)");
  CLI::App* const verify = add(
      "verify", "Read a checkpoint, or all, and compare every byte with its checksum", verify_checkpoints);
  CLI::Option* const step = add_step(*verify, arguments, "Step to verify (default: the latest)");
  verify->add_flag("--all", arguments->all, "Verify every step")->excludes(step);
  verify->add_flag("--all-nodes", arguments->all_nodes,
                   "Verify what all nodes have that saved with local=True: start it with torchrun on each");
  CLI::App* const collect =
      add("gc", "Remove what interrupted saves and removals have left behind; never a checkpoint",
          collect_debris);
  collect->add_flag("--dry-run", arguments->dry_run, "Report what would be removed, and remove nothing");
  collect->add_flag("--orphaned", arguments->orphaned,
                    "Also remove shards on volumes whose step was moved out of DIR, or removed, by hand");
  add("adopt",
      "Make DIR the owner of the shards on its volumes, in place of an original that no longer exists",
      adopt_volumes);
  for (const PackageCommand& each : kPackageCheckpointCommands)
    add_package_command(app, *group, chosen, each);
}

}  // namespace trunkline::cli
