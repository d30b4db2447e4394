// Shards of an earlier checkpoint that a save takes over as hard links, instead of writing their bytes again
// (docs/formats/checkpoint.md, the feature "incremental").
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/directory_ops.h"
#include "checkpoint/manifest.h"
#include "checkpoint/placement.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// A link in the directory of a step, under a name of the save that made it.
struct ShardLink {
  Shard shard;  // for the manifest of the save, with the commit that wrote it
  std::string path;
};

struct ShardLinks {
  std::vector<std::optional<ShardLink>> links;  // one for each that was wanted; nullopt: not linked
  std::optional<Error> problem;  // why the first of those was not linked, unless it is on another volume
};

// Links the shards `wanted` (indices) of `base` into the directories of `step` that `placement` uses. A shard
// that is on another volume, or has another size than its manifest says, is not linked; neither is one where
// the filesystem cannot do that. The names are not durable yet.
ShardLinks link_shards(const std::string& directory, std::uint64_t step, const Placement& placement,
                       const Manifest& base, std::span<const std::uint64_t> wanted, const DirectoryOps& ops);

}  // namespace trunkline::checkpoint
