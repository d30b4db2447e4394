#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>
#include <vector>

#include "checkpoint/listing.h"
#include "checkpoint/verify.h"
#include "cli/checkpoint/checkpoint_actions.h"
#include "cli/checkpoint/checkpoint_output.h"
#include "cli/engine_json.h"
#include "cli/text_table.h"
#include "trunkline/units.h"

namespace trunkline::cli {

using Json = nlohmann::ordered_json;

namespace {

// Counts the shards that exist with the size given by the manifest; does not read their contents.
std::size_t count_shards(const std::string& directory, const checkpoint::Manifest& manifest) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(checkpoint::shard_path(directory, manifest, i), error);
    if (!error && bytes == manifest.shards[i].bytes) ++found;
  }
  return found;
}

struct Listed {
  Result<checkpoint::Manifest> manifest;
  std::size_t shards_there = 0;

  bool is_whole() const { return manifest && shards_there == manifest->shards.size(); }
};

// A checkpoint that cannot be read may still be complete: it may belong to another user, or the disk may have
// an error.
std::string_view state_of(const Error& error) {
  const bool is_damaged = error.kind == ErrorKind::corrupt || error.kind == ErrorKind::format;
  return is_damaged ? "damaged" : "could not be read";
}

// nullopt: the checkpoint was removed meanwhile. A run that is saving may remove or replace a checkpoint
// while it is examined: it only counts as damaged if it is still the same one afterwards.
std::optional<Listed> examine(const checkpoint::Store& store, std::uint64_t step) {
  constexpr int kMaxLooks = 10;
  for (int looks = 1;; ++looks) {
    Listed listed{.manifest = store.read_manifest(step)};
    if (listed.manifest) listed.shards_there = count_shards(store.directory(), *listed.manifest);
    if (listed.is_whole() || looks == kMaxLooks) return listed;
    const auto steps = store.steps();
    if (steps && std::ranges::find(*steps, step) == steps->end()) return std::nullopt;
    const auto again = store.read_manifest(step);
    const bool is_same = listed.manifest ? again && again->commit == listed.manifest->commit
                                         : !again && again.error().message == listed.manifest.error().message;
    if (is_same) return listed;
  }
}

// What the step's own save wrote, "1.5 GB" or, if it was incremental, "45.6 MB (3%)".
std::string written(const checkpoint::Manifest& manifest) {
  std::string text = format_bytes(bytes_written(manifest));
  if (manifest.unit_bytes != 0) text += fmt::format(" ({:.3g}%)", 100 * written_share(manifest));
  return text;
}

// The steps of the directories that the checkpoints are copied to, where those are on record.
Json tiers_json(const std::vector<checkpoint::RecordedTier>& tiers) {
  Json list = Json::array();
  for (const checkpoint::RecordedTier& tier : tiers) {
    Json entry = {{"directory", tier.directory}};
    const auto store = checkpoint::Store::open(tier.directory, {.if_missing = checkpoint::IfMissing::fail});
    if (!store) {
      const bool is_new = tier.id.empty() && store.error().code == ENOENT;
      if (is_new)
        entry["steps"] = Json::array();
      else
        entry["error"] = error_json(store.error());
    } else if (const auto steps = (*store)->steps(); steps) {
      entry["steps"] = *steps;
    } else {
      entry["error"] = error_json(steps.error());
    }
    list.push_back(std::move(entry));
  }
  return list;
}

std::string lines_of_tiers(const Json& tiers) {
  std::string lines;
  for (const Json& tier : tiers) {
    const auto steps = tier.contains("steps") ? tier["steps"].get<std::vector<std::uint64_t>>()
                                              : std::vector<std::uint64_t>{};
    const std::string what = tier.contains("error") ? tier["error"]["message"].get<std::string>()
                             : steps.empty()        ? "no checkpoints yet"
                                                    : checkpoint::in_words(steps);
    lines += printable(fmt::format("tier {}: {}", tier["directory"].get<std::string>(), what));
    lines += '\n';
  }
  return lines;
}

}  // namespace

int list_checkpoints(const CheckpointArguments& arguments) {
  const auto store = open_store(arguments);
  if (!store) return fail(arguments, "ls", store.error());
  const auto steps = (*store)->steps();
  if (!steps) return fail(arguments, "ls", steps.error());
  const auto latest = (*store)->latest();
  if (!latest) return fail(arguments, "ls", latest.error());

  Json document = document_of("ls", arguments);
  const std::optional<std::uint64_t>& last = *latest;
  document["latest"] = last ? Json(*last) : Json();
  document["checkpoints"] = Json::array();
  TextTable table({"step", "commit", "time", "ranks", "shards", "tensors", "size", "written", ""});
  bool whole = true;
  for (const std::uint64_t step : *steps) {
    const std::string mark = step == last ? "latest" : "";
    const std::optional<Listed> listed = examine(**store, step);
    if (!listed) continue;
    const auto& manifest = listed->manifest;
    if (!manifest) {
      whole = false;
      document["checkpoints"].push_back({{"step", step}, {"error", error_json(manifest.error())}});
      table.add({fmt::format("{}", step), "", "", "", "", "", "", "",
                 fmt::format("{}{}", mark.empty() ? mark : mark + ", ", state_of(manifest.error()))});
      print_problem("ls", manifest.error().message);
      continue;
    }
    const std::uint64_t bytes = bytes_to_verify(*manifest);
    const auto shards_there = listed->shards_there;
    const bool is_complete = listed->is_whole();
    if (!is_complete) {
      whole = false;
      const std::size_t shards = manifest->shards.size();
      const std::string lacking = shards == 1
                                      ? "its only shard is"
                                      : fmt::format("{} of its {} shards are", shards - shards_there, shards);
      print_problem("ls", fmt::format("step {} is incomplete: {} missing or truncated; "
                                      "`trunkline checkpoint verify {} --step {}` says more",
                                      step, lacking, arguments.directory, step));
    }
    document["checkpoints"].push_back({{"step", step},
                                       {"commit", manifest->commit},
                                       {"time", manifest->time},
                                       {"world_size", manifest->world_size},
                                       {"shards", manifest->shards.size()},
                                       {"tensors", manifest->tensors.size()},
                                       {"bytes", bytes},
                                       {"bytes_written", bytes_written(*manifest)},
                                       {"written_share", written_share(*manifest)},
                                       {"is_complete", is_complete}});
    table.add({fmt::format("{}", step), fmt::format("{}", manifest->commit), manifest->time,
               fmt::format("{}", manifest->world_size), fmt::format("{}", manifest->shards.size()),
               fmt::format("{}", manifest->tensors.size()), format_bytes(bytes), written(*manifest),
               is_complete    ? mark
               : mark.empty() ? "incomplete"
                              : mark + ", incomplete"});
  }
  std::string text =
      steps->empty() ? printable(arguments.directory) + " has no checkpoints\n" : table.render();
  if (const auto tiers = (*store)->tiers(); !tiers) {
    whole = false;
    print_problem("ls", tiers.error().message);
  } else if (!tiers->empty()) {
    document["tiers"] = tiers_json(*tiers);
    text += '\n';
    text += lines_of_tiers(document["tiers"]);
  }
  return print(arguments, document, text, whole);
}

}  // namespace trunkline::cli
