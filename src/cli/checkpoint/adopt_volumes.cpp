#include <fmt/format.h>

#include "cli/checkpoint/checkpoint_actions.h"
#include "cli/checkpoint/checkpoint_output.h"

namespace trunkline::cli {

int adopt_volumes(const CheckpointArguments& arguments) {
  const auto store = open_store(arguments);
  if (!store) return fail(arguments, "adopt", store.error());
  const auto adopted = (*store)->adopt();
  if (!adopted) return fail(arguments, "adopt", adopted.error());

  auto document = document_of("adopt", arguments);
  document["volumes"] = adopted->volumes;
  document["missing"] = adopted->missing;
  std::string text;
  for (const std::string& volume : adopted->volumes)
    text += fmt::format("{} belongs to {}\n", printable(volume), printable((*store)->directory()));
  for (const std::string& volume : adopted->missing)
    print_problem("adopt", fmt::format("volume {} is missing: mount its disk, and run this again", volume));
  if (adopted->volumes.empty() && adopted->missing.empty())
    text = "nothing to adopt: the directory has no volumes\n";
  return print(arguments, document, text, adopted->missing.empty());
}

}  // namespace trunkline::cli
