// Which directory of checkpoints the shards in a directory on a volume belong to
// (docs/formats/checkpoint.md). A copy of that directory names the same shards: it may read them, and must
// neither remove nor add any.
#pragma once

#include <string>

#include "checkpoint/changes.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Whether `directory` may change what lies in `volume`, a directory NAME-ID: when it is the home that is
// recorded there, or none is, or the one that is recorded has gone. Otherwise `unsupported`, naming both and
// what to do. A volume that is not there holds nothing to change.
Status check_home(const std::string& volume, const std::string& directory);

// The same of all volumes of a descriptor.
Status check_homes(const StoreDescriptor& descriptor, const std::string& directory);

// As check_home(), and records `directory` as the home, durably, if that is not what the record says.
Status take_home(const std::string& volume, const std::string& directory, const Changes& changes);

}  // namespace trunkline::checkpoint
