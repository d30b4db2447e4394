// Finds references to shards from step directories and manifests that are not where a save put them, because
// users renamed them, moved them into a folder or copied them. The shards that they name on volumes must
// outlive the step.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "checkpoint/directory_ops.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Adds all shard names that occur in a text, whatever else it contains.
void add_shard_names(std::string_view text, std::set<std::string>& names);

// The shards that manifests below `directory` name (for a run that was set aside, also manifests around it),
// except manifests that belong to their own step there (DIR/step-S/manifest-C). A manifest is any file with
// "manifest" in its name; folders are searched kMaxFolderDepth deep, and symbolic links from `directory`
// itself to folders outside are followed. Fails where anything cannot be read, since it may name whatever is
// about to be removed.
inline constexpr unsigned kMaxFolderDepth = 8;
Result<std::set<std::string>> shards_named_below(const std::string& directory);

// The same for the directory of a single step: shards beside a manifest that was renamed.
Result<std::set<std::string>> shards_named_beside(const std::string& step_directory);

// A step directory that was moved out of the directory of checkpoints left its shards on the volumes. Before
// the same step is saved again, they are listed in a file beside them, so that they stay when that step is
// removed. `volume_step` is the step's directory on a volume.
Status keep_moved_shards(const std::string& volume_step, const DirectoryOps& ops);
Result<std::set<std::string>> moved_shards(const std::string& volume_step);

}  // namespace trunkline::checkpoint
