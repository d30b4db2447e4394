#include "tuning/tuning.h"

#include <fmt/format.h>

#include <array>

#include "trunkline/units.h"

namespace trunkline::tuning {
namespace {

constexpr std::array<std::string_view, kPatterns> kPatternNames{"sequential read", "sequential write",
                                                                "random read", "random write"};

}  // namespace

std::string_view pattern_name(std::size_t pattern) { return kPatternNames.at(pattern); }

bool are_valid(const Settings& settings) {
  if (settings.backend == BackendKind::automatic || settings.backend == BackendKind::memory) return false;
  const unsigned lanes = settings.lanes.value_or(1);
  const unsigned depth = settings.queue_depth.value_or(1);
  const std::uint64_t block = settings.block_bytes.value_or(4096);
  return lanes >= 1 && lanes <= 64 && depth >= 1 && depth <= 4096 && block >= 4096 && block <= kGiB &&
         block % 4096 == 0;
}

std::string block_text(std::uint64_t bytes) {
  return bytes % kMiB == 0 ? fmt::format("{} MiB", bytes / kMiB) : fmt::format("{} KiB", bytes / kKiB);
}

std::string to_string(const Settings& settings) {
  std::string text;
  const auto add = [&text](std::string_view part) {
    if (!text.empty()) text += ", ";
    text += part;
  };
  if (settings.backend) add(trunkline::to_string(*settings.backend));
  if (settings.lanes) add(fmt::format("{} lane{}", *settings.lanes, *settings.lanes == 1 ? "" : "s"));
  if (settings.queue_depth) add(fmt::format("queue depth {}", *settings.queue_depth));
  if (settings.block_bytes) add(fmt::format("blocks of {}", block_text(*settings.block_bytes)));
  if (settings.direct) add(*settings.direct ? "direct I/O" : "page cache");
  return text.empty() ? "the defaults" : text;
}

}  // namespace trunkline::tuning
