// Opening a directory of checkpoints: its descriptor, and the directories that belong to it on volumes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/directory_ops.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// The descriptor that lies in the directory; nothing where there is none.
Result<std::optional<StoreDescriptor>> read_store_descriptor(const std::string& directory);

// What the descriptor becomes when shards shall lie on `volumes` from now on (paths of users; the directories
// that belong to the store are made from them). Those that it names already keep their directories.
StoreDescriptor with_volumes(const StoreDescriptor& before, const std::vector<std::string>& volumes,
                             const std::string& directory);

// The paths that with_volumes() made the directories of a descriptor from.
std::vector<std::string> parents_of(const std::vector<std::string>& volumes);

// Makes the directories on volumes that `before` does not name, then the descriptor, all durably. EEXIST when
// there is no `before` and another has made the descriptor meanwhile.
Status write_store_descriptor(const std::string& directory, const StoreDescriptor& descriptor,
                              const std::optional<StoreDescriptor>& before, const DirectoryOps& ops);

// Empty where there is no descriptor.
inline std::string id_of(const std::optional<StoreDescriptor>& descriptor) {
  return descriptor ? descriptor->id : std::string();
}

}  // namespace trunkline::checkpoint
