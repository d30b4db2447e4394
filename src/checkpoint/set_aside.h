// Setting a run aside: its checkpoints move into a folder of their directory, which is then a directory of
// checkpoints of its own, and the next run starts in an empty one. Nothing is removed.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/directory_ops.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Whether set_aside() can move all of it: a step that is a relative link would lead elsewhere from the
// folder, and volumes that are missing may not be mounted.
Status check_can_be_set_aside(const std::string& directory, const std::optional<StoreDescriptor>& before);

// Moves all steps of `directory`, but foreign ones (own_directory.h), into a new folder in it, and returns
// the folder's path. `before` is the descriptor of the directory, `after` the one that it gets, with another
// id and volumes of its own. Who calls this holds the lock. After an error, and after a crash, each step is
// in the directory or in the folder, whole; the descriptor is `before` or `after`, and `after` if any step
// has moved.
Result<std::string> set_aside(const std::string& directory, const std::optional<StoreDescriptor>& before,
                              const StoreDescriptor& after, const DirectoryOps& ops);

}  // namespace trunkline::checkpoint
