#include "io/tuned_settings.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/gpu/gds_policy.h"
#include "io/lane/plan.h"

namespace trunkline::io {
namespace {

// Whether the slots of the engine, and direct I/O, support blocks of this size.
bool block_fits(std::uint64_t block, const EngineConfig& config, const os::DirectLimits& limits) {
  const std::uint64_t alignment = limits.offset_alignment;
  return slot_bytes(block) <= config.slot_bytes && block % alignment == 0 &&
         slot_bytes(block) % alignment == 0;
}

}  // namespace

std::optional<EngineOptions> tuned_options(const EngineOptions& options, const tuning::Settings& settings,
                                           bool block) {
  EngineOptions tuned = options;
  bool changed = false;
  const auto follow = [&changed](auto& option, const auto& setting) {
    if (option || !setting) return;
    option = setting;
    changed = true;
  };
  if (settings.backend && options.backend == BackendKind::automatic) {
    tuned.backend = *settings.backend;
    changed = true;
  }
  if (!settings.backend || tuned.backend == *settings.backend) {
    follow(tuned.lanes, settings.lanes);
    follow(tuned.queue_depth, settings.queue_depth);
  }
  if (block) follow(tuned.block_bytes, settings.block_bytes);
  return changed ? std::optional(tuned) : std::nullopt;
}

os::DirectPolicy tuned_policy(const EngineConfig& config, Direct direct, const tuning::Tuning* tuning) {
  const bool faster = tuning != nullptr && tuning->settings.direct.value_or(false);
  const bool slower = tuning != nullptr && !tuning->settings.direct.value_or(true);
  // GPUs that must read files directly cannot go through the page cache.
  const bool gds_required = is_gds_required(config.gpu);
  switch (direct) {
    case Direct::always:
      return os::DirectPolicy::always;
    case Direct::never:
      return os::DirectPolicy::never;
    case Direct::unless_cached:
      if (gds_required) return os::DirectPolicy::automatic;
      return slower ? os::DirectPolicy::measured_slower : os::DirectPolicy::unless_cached;
    case Direct::automatic:
      break;
  }
  if (faster) return os::DirectPolicy::measured_faster;
  return slower && !gds_required ? os::DirectPolicy::measured_slower : os::DirectPolicy::automatic;
}

std::uint64_t tuned_block_bytes(const EngineConfig& config, bool block_was_passed, const FileCore& file,
                                const tuning::Tuning* tuning) {
  if (block_was_passed || tuning == nullptr) return 0;
  const std::uint64_t block = tuning->settings.block_bytes.value_or(0);
  if (block == 0) return 0;
  const bool fits = std::ranges::all_of(
      file.members, [&](const Member& member) { return block_fits(block, config, member.pair.limits); });
  return fits ? block : 0;
}

TuningExplanation explain_tuning(const EngineConfig& config, bool block_was_passed,
                                 const os::DirectLimits& limits, const tuning::Tuning* tuning,
                                 std::string_view problem) {
  if (tuning == nullptr) {
    return {.why = problem.empty() ? "no saved settings; `trunkline tune PATH` measures which are fastest"
                                   : fmt::format("no saved settings are in effect: {}", problem)};
  }
  const tuning::Settings& settings = tuning->settings;
  TuningExplanation explanation{.time = tuning->time, .settings = to_string(settings)};
  if (settings.is_default()) {
    explanation.in_effect = true;
    explanation.why = "the defaults were measured as fastest";
    return explanation;
  }
  const bool created_alike = settings.backend.value_or(config.backend) == config.backend &&
                             settings.lanes.value_or(config.lanes) == config.lanes &&
                             settings.queue_depth.value_or(config.queue_depth) == config.queue_depth;
  const std::uint64_t block = settings.block_bytes.value_or(config.block_bytes);
  const bool is_outdone = block_was_passed && block != config.block_bytes;
  const bool fits = block == config.block_bytes || block_fits(block, config, limits);
  explanation.in_effect = created_alike && !is_outdone && fits;
  explanation.why = "measured as fastest";
  if (!created_alike) {
    explanation.why += fmt::format(
        "; not used by this engine, which was created with {}, lanes={}, queue_depth={}: for backend, lanes "
        "and "
        "queue depth, pass the path to Engine, and leave these arguments out",
        trunkline::to_string(config.backend), config.lanes, config.queue_depth);
  }
  if (is_outdone) {
    explanation.why += fmt::format("; block_bytes={} was passed, and is used instead", config.block_bytes);
  } else if (!fits) {
    explanation.why += fmt::format(
        "; blocks of {} are not used: the buffers of this engine are for blocks of {}, or direct I/O on the "
        "file does not allow them",
        tuning::block_text(block), tuning::block_text(config.block_bytes));
  }
  return explanation;
}

}  // namespace trunkline::io
