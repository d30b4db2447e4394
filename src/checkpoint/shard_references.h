// Shards that manifests refer to which are not where a save put them: of step directories and manifests that
// users renamed, moved into a folder or copied. What they name on volumes must outlive the step.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "checkpoint/directory_ops.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Adds the names of shards that stand in a text, whatever else is in it.
void add_shard_names(std::string_view text, std::set<std::string>& names);

// The shards that manifests below `directory` name, and of a run that was set aside those around it, apart
// from those that are the manifest of their own step there (DIR/step-S/manifest-C). A manifest is any file
// with "manifest" in its name; folders are searched kMaxFolderDepth deep, and symbolic links to folders
// outside are followed from `directory` itself. Fails where any of it cannot be read, since it may name
// whatever is about to be removed.
inline constexpr unsigned kMaxFolderDepth = 8;
Result<std::set<std::string>> shards_named_below(const std::string& directory);

// The same of the directory of a step alone: shards beside a manifest that was renamed.
Result<std::set<std::string>> shards_named_beside(const std::string& step_directory);

// A step directory that was moved out of the directory of checkpoints left its shards on the volumes. Before
// the same step is saved again, they are listed in a file beside them, and stay when that step goes.
// `volume_step` is the step's directory on a volume.
Status keep_moved_shards(const std::string& volume_step, const DirectoryOps& ops);
Result<std::set<std::string>> moved_shards(const std::string& volume_step);

}  // namespace trunkline::checkpoint
