// Which directory of checkpoints owns the shards in a directory on a volume (docs/formats/checkpoint.md). A
// copy of the owner names the same shards: it may read them, but must neither remove nor add any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/directory_ops.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Whether `directory` may change the contents of `volume`, a directory NAME-ID: it may if it is the recorded
// owner, under this name or renamed since, or if none is recorded. Otherwise `unsupported`, with both
// directories and a remedy in the message: a copy takes over only by adopt_volume(). A volume that does not
// exist holds nothing to change.
Status check_owner(const std::string& volume, const std::string& directory);

// The same for all volumes of a descriptor.
Status check_owners(const StoreDescriptor& descriptor, const std::string& directory);

// The same for callers that do not save: fails also where the volume has no record (a purge of old files
// removed it). Without one, any copy of the owner would look like the owner.
Status check_recorded_owner(const std::string& volume, const std::string& directory);

// Like check_owner(), and records `directory` as the owner, durably, unless it is recorded already. A record
// that stays gets a new modification time, so that no purge of old files removes it from a live run.
Status record_owner(const std::string& volume, const std::string& directory, const DirectoryOps& ops);

// Records `directory` as the owner regardless of the current record, because the user or the recorded owner
// itself says so. `unsupported` where the recorded one is still in its place and has checkpoints with shards
// there; check_can_adopt() checks this beforehand.
Status adopt_volume(const std::string& volume, const std::string& directory, const DirectoryOps& ops);
Status check_can_adopt(const std::string& volume, const std::string& directory);

// Where `volume` belongs to another directory than `directory`: a clause for the message that a shard of
// `step` is missing there.
std::optional<std::string> why_gone(const std::string& volume, const std::string& directory,
                                    std::uint64_t step);

}  // namespace trunkline::checkpoint
