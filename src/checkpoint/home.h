// Which directory of checkpoints the shards in a directory on a volume belong to
// (docs/formats/checkpoint.md). A copy of that directory names the same shards: it may read them, and must
// neither remove nor add any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/changes.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Whether `directory` may change what lies in `volume`, a directory NAME-ID: when it is the home that is
// recorded there, under this name or renamed since, or none is recorded. Otherwise `unsupported`, naming both
// directories and what to do: a copy takes over only where adopt_home() is called. A volume that is not there
// holds nothing to change.
Status check_home(const std::string& volume, const std::string& directory);

// The same of all volumes of a descriptor.
Status check_homes(const StoreDescriptor& descriptor, const std::string& directory);

// The same, for who does not save: fails also where the volume has no record (a purge of old files took it).
// Then any copy of the home would look like it.
Status check_recorded_home(const std::string& volume, const std::string& directory);

// As check_home(), and records `directory` as the home, durably, if that is not what the record says. A
// record that stays gets a new time of modification, so that no purge of old files takes it from a live run.
Status take_home(const std::string& volume, const std::string& directory, const Changes& changes);

// Records `directory` as the home, whichever is recorded there, because the user or the recorded home itself
// says so. `unsupported` where the recorded one is still in its place and has checkpoints that lie there;
// check_can_adopt() says so beforehand.
Status adopt_home(const std::string& volume, const std::string& directory, const Changes& changes);
Status check_can_adopt(const std::string& volume, const std::string& directory);

// Where `volume` belongs to another directory than `directory`: a clause for a message that a shard of `step`
// is missing there.
std::optional<std::string> why_gone(const std::string& volume, const std::string& directory,
                                    std::uint64_t step);

}  // namespace trunkline::checkpoint
