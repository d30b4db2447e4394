#include <fmt/format.h>

#include "cli/checkpoint/checkpoint_actions.h"
#include "cli/checkpoint/checkpoint_output.h"
#include "cli/engine_json.h"
#include "trunkline/units.h"

namespace trunkline::cli {

using Json = nlohmann::ordered_json;

int collect_debris(const CheckpointArguments& arguments) {
  using checkpoint::GarbageCollector;
  const auto store = open_store(arguments);
  if (!store) return fail(arguments, "gc", store.error());
  const auto result = (*store)->collect(
      arguments.dry_run ? GarbageCollector::DryRun::yes : GarbageCollector::DryRun::no,
      arguments.orphaned ? GarbageCollector::Orphans::remove : GarbageCollector::Orphans::leave);
  if (!result) return fail(arguments, "gc", result.error());

  Json document = document_of("gc", arguments);
  document["dry_run"] = arguments.dry_run;
  document["busy"] = result->is_busy;
  document["bytes"] = result->bytes();
  document["removed"] = Json::array();
  document["problems"] = Json::array();
  std::string text;
  for (const checkpoint::Removed& each : result->removed) {
    document["removed"].push_back({{"path", each.path}, {"bytes", each.bytes}});
    text += fmt::format("{} {}\n", arguments.dry_run ? "would remove" : "removed", printable(each.path));
  }
  for (const Error& problem : result->problems) {
    document["problems"].push_back(error_json(problem));
    print_problem("gc", fmt::format("left in place: {}", problem.message));
  }
  if (result->is_busy) {
    print_problem("gc", fmt::format("a save into {} is in progress; {}, try again when it has ended",
                                    arguments.directory,
                                    result->removed.empty() ? "nothing was removed" : "not all was removed"));
  } else if (result->removed.empty()) {
    text = "nothing to remove\n";
  } else {
    text +=
        fmt::format("{} {}\n", format_bytes(result->bytes()), arguments.dry_run ? "would be freed" : "freed");
  }
  return print(arguments, document, text, !result->is_busy && result->problems.empty());
}

}  // namespace trunkline::cli
