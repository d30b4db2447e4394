#include "cli/checkpoint/checkpoint_command.h"

#include <charconv>
#include <memory>
#include <string>

#include "checkpoint/manifest.h"
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

// Parsing as a 64-bit unsigned number would accept "-1" as a large one.
std::string objection_to_step(const std::string& text) {
  std::uint64_t step = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && step <= checkpoint::kMaxNumber ? "" : "must be a whole number from 0 to 2^63 - 1";
}

CLI::Option* add_step(CLI::App& command, const Arguments& arguments) {
  return command.add_option("--step", arguments->step, "Number of the step [the latest]")
      ->check(CLI::Validator(objection_to_step, "STEP"));
}

}  // namespace

void add_checkpoint(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* const group =
      app.add_subcommand("checkpoint", "List, verify and clean up directories of checkpoints");
  group->require_subcommand(1);
  const auto arguments = std::make_shared<CheckpointArguments>();
  const auto add = [&](const char* name, const char* description, int (*action)(const CheckpointArguments&)) {
    return add_action(*group, arguments, chosen, name, description, action);
  };
  add("ls", "List the checkpoints", list_checkpoints);
  CLI::App* const show = add("show", "Show what a checkpoint contains, and where", show_checkpoint);
  add_step(*show, arguments);
  CLI::App* const verify = add("verify", "Read checkpoints and compare every checksum", verify_checkpoints);
  CLI::Option* const step = add_step(*verify, arguments);
  verify->add_flag("--all", arguments->all, "Verify all steps")->excludes(step);
  CLI::App* const collect =
      add("gc", "Remove leftovers of interrupted saves; never a checkpoint", collect_debris);
  collect->add_flag("--dry-run", arguments->dry_run, "Only report what would be removed");
  collect->add_flag("--orphaned", arguments->orphaned,
                    "Also shards on volumes whose step was moved out of DIR, or removed, by hand");
  add("adopt",
      "Make DIR the owner of the shards on its volumes, in place of an original that no longer exists",
      adopt_volumes);
  // After the subcommands, which would inherit it.
  group->footer(
      "With the Python package also: export, import (files of other programs), rm, diff (trunkline "
      "checkpoint export --help)");
}

}  // namespace trunkline::cli
