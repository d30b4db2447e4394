// Reads and writes a directory's descriptor, and creates the directories on volumes that belong to it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/directory_ops.h"
#include "checkpoint/store_descriptor.h"
#include "checkpoint/tier_record.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Reads the directory's descriptor; nullopt where there is none.
Result<std::optional<StoreDescriptor>> read_store_descriptor(const std::string& directory);

// The descriptor for storing shards on `volumes` from now on (paths given by users; the store's directories
// are derived from them). Those that it already names keep their directories.
StoreDescriptor with_volumes(const StoreDescriptor& before, const std::vector<std::string>& volumes,
                             const std::string& directory);

// The paths from which with_volumes() derived a descriptor's directories.
std::vector<std::string> parents_of(const std::vector<std::string>& volumes);

// Creates the directories on volumes that `before` does not name, then the descriptor, all durably. EEXIST
// when there is no `before` and someone else has created the descriptor meanwhile.
Status write_store_descriptor(const std::string& directory, const StoreDescriptor& descriptor,
                              const std::optional<StoreDescriptor>& before, const DirectoryOps& ops);

struct OwnTiers {
  std::vector<RecordedTier> tiers = {};
  bool is_copied = false;  // the record was written for another directory, which this one is a copy of
};

// The tiers of a directory with this descriptor; none where there is no record, or only one that was written
// for another descriptor.
Result<OwnTiers> read_tiers(const std::string& directory, const std::optional<StoreDescriptor>& descriptor);
Status write_tiers(const std::string& directory, const StoreDescriptor& descriptor,
                   const std::vector<RecordedTier>& tiers, const DirectoryOps& ops);

// Empty where there is no descriptor.
inline std::string id_of(const std::optional<StoreDescriptor>& descriptor) {
  return descriptor ? descriptor->id : std::string();
}

}  // namespace trunkline::checkpoint
