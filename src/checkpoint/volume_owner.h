// Which directory of checkpoints the shards in a directory on a volume belong to
// (docs/formats/checkpoint.md). A copy of that directory names the same shards: it may read them, and must
// neither remove nor add any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/directory_ops.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Whether `directory` may change what lies in `volume`, a directory NAME-ID: when it is the owner that is
// recorded there, under this name or renamed since, or none is recorded. Otherwise `unsupported`, naming both
// directories and what to do: a copy takes over only where adopt_volume() is called. A volume that is not
// there holds nothing to change.
Status check_owner(const std::string& volume, const std::string& directory);

// The same of all volumes of a descriptor.
Status check_owners(const StoreDescriptor& descriptor, const std::string& directory);

// The same, for who does not save: fails also where the volume has no record (a purge of old files took it).
// Then any copy of the owner would look like it.
Status check_recorded_owner(const std::string& volume, const std::string& directory);

// As check_owner(), and records `directory` as the owner, durably, if that is not what the record says. A
// record that stays gets a new time of modification, so that no purge of old files takes it from a live run.
Status record_owner(const std::string& volume, const std::string& directory, const DirectoryOps& ops);

// Records `directory` as the owner, whichever is recorded there, because the user or the recorded owner
// itself says so. `unsupported` where the recorded one is still in its place and has checkpoints that lie
// there; check_can_adopt() says so beforehand.
Status adopt_volume(const std::string& volume, const std::string& directory, const DirectoryOps& ops);
Status check_can_adopt(const std::string& volume, const std::string& directory);

// Where `volume` belongs to another directory than `directory`: a clause for a message that a shard of `step`
// is missing there.
std::optional<std::string> why_gone(const std::string& volume, const std::string& directory,
                                    std::uint64_t step);

}  // namespace trunkline::checkpoint
