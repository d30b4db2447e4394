// Sets a run aside: its checkpoints move into a folder of their directory, which becomes a separate directory
// of checkpoints, and the next run starts in an empty one. Nothing is removed.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/directory_ops.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Whether set_aside() can move everything: a step that is a relative link would lead elsewhere from the
// folder, and missing volumes may be unmounted.
Status check_can_be_set_aside(const std::string& directory, const std::optional<StoreDescriptor>& before);

// Moves all steps of `directory`, except foreign ones (own_directory.h), into a new folder in it, and returns
// the folder's path. `before` is the descriptor of the directory, `after` its new one, with another id and
// its own volumes. The caller holds the lock. After an error or a crash, each step is complete, either in the
// directory or in the folder; the descriptor is `before` or `after`, and it is `after` if any step has moved.
Result<std::string> set_aside(const std::string& directory, const std::optional<StoreDescriptor>& before,
                              const StoreDescriptor& after, const DirectoryOps& ops);

}  // namespace trunkline::checkpoint
