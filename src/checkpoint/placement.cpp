#include "checkpoint/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <utility>

#include "base/invalid_argument.h"
#include "checkpoint/listing.h"
#include "checkpoint/names.h"
#include "checkpoint/shard_references.h"
#include "os/access.h"
#include "os/file_type.h"

namespace trunkline::checkpoint {
namespace {

constexpr std::uint64_t kMaxShards = 1 << 20;

std::unexpected<Error> volume_is_missing(const std::string& volume, const std::string& directory) {
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = ENOENT,
            .message = fmt::format("cannot save into {}: {} is missing: ENOENT. Mount its volume; if that "
                                   "disk is lost, open the directory with other volumes=[...]. On a "
                                   "new disk in its place, name another folder",
                                   directory, volume),
            .path = volume});
}

void find_replaced(const std::string& directory, const StoreDescriptor& descriptor, std::uint64_t step,
                   Placement& placement) {
  const std::string own = volume_step_directory(directory, std::string(kOwnVolume), step);
  placement.replaced_manifest =
      os::most_private_file(own, [](std::string_view name) { return commit_of(name).has_value(); });
  if (placement.replaced_manifest.empty()) return;
  placement.replaced_shard = os::most_private_file(own, is_shard_file);
  for (const std::string& volume : descriptor.all_volumes()) {
    if (!placement.replaced_shard.empty()) return;
    placement.replaced_shard =
        os::most_private_file(volume_step_directory(directory, volume, step), is_shard_file);
  }
  if (placement.replaced_shard.empty()) placement.replaced_shard = placement.replaced_manifest;
}

}  // namespace

Status check_can_place(const StoreDescriptor& descriptor, std::uint64_t step,
                       std::span<const std::uint64_t> shards) {
  const std::size_t volumes = std::max<std::size_t>(1, descriptor.volumes.size());
  if (step > kMaxNumber) return invalid_argument("step: is beyond 2^63 - 1");
  if (shards.size() != volumes)
    return invalid_argument(fmt::format("shards: {} numbers for {} volumes", shards.size(), volumes));
  if (std::ranges::any_of(shards, [](std::uint64_t count) { return count > kMaxShards; }))
    return invalid_argument(fmt::format("shards: more than {} on a volume", kMaxShards));
  return {};
}

Status make_step_directories(const std::string& directory, const StoreDescriptor& descriptor,
                             std::uint64_t step, std::span<const std::uint64_t> shards,
                             const DirectoryOps& ops) {
  // Also when they exist: the process that made them may have died before that was durable.
  const auto make = [&](const std::string& parent) -> Status {
    if (auto made = ops.make_directory(fmt::format("{}/{}", parent, step_directory(step))); !made)
      return made;
    return ops.sync_directory(parent);
  };
  // Where the directory has no such step, shards of it on volumes belong to one that was moved out: they are
  // put on record before those of this save lie beside them. Former volumes have such shards, too.
  if (!os::is_directory(fmt::format("{}/{}", directory, step_directory(step)))) {
    for (const std::string& volume : descriptor.all_volumes()) {
      const std::string there = volume_step_directory(directory, volume, step);
      if (auto kept = keep_moved_shards(there, ops); !kept) return kept;
    }
  }
  if (auto made = make(directory); !made) return made;
  for (std::size_t i = 0; i < descriptor.volumes.size(); ++i) {
    if (shards[i] == 0) continue;
    const std::string& volume = descriptor.volumes[i];
    if (!os::is_directory(volume)) return volume_is_missing(volume, directory);
    if (auto made = make(volume); !made) return made;
  }
  return {};
}

Result<HeldDirectories> hold_step_directories(const std::string& directory, const StoreDescriptor& descriptor,
                                              std::uint64_t step, std::span<const std::uint64_t> shards) {
  HeldDirectories directories;
  if (auto held = directories.hold(volume_step_directory(directory, std::string(kOwnVolume), step)); !held)
    return std::unexpected(held.error());
  for (std::size_t i = 0; i < descriptor.volumes.size(); ++i) {
    if (shards[i] == 0) continue;
    auto held = directories.hold(volume_step_directory(directory, descriptor.volumes[i], step));
    if (!held) return std::unexpected(held.error());
  }
  return directories;
}

Placement place_shards(const std::string& directory, const StoreDescriptor& descriptor, std::uint64_t step,
                       std::span<const std::uint64_t> shards) {
  Placement placement;
  placement.volumes = descriptor.volumes;
  if (placement.volumes.empty()) placement.volumes.emplace_back(kOwnVolume);
  find_replaced(directory, descriptor, step, placement);
  placement.nonce = random_hex(16);
  const std::uint64_t total = std::accumulate(shards.begin(), shards.end(), std::uint64_t{0});
  for (std::size_t volume = 0; volume < shards.size(); ++volume) {
    const std::string where = volume_step_directory(directory, placement.volumes[volume], step);
    for (std::uint64_t i = 0; i < shards[volume]; ++i) {
      const std::string file = shard_file(placement.shards.size(), total, placement.nonce);
      placement.shards.push_back({.volume = volume, .file = file, .bytes = 0, .crc32c = {}});
      placement.paths.push_back(fmt::format("{}/{}", where, file));
    }
  }
  return placement;
}

}  // namespace trunkline::checkpoint
