// That all volumes of a directory of checkpoints are its own (volume_owner.h: one volume).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/directory_ops.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// What becomes of a volume without a record of whose it is: only a save makes one.
enum class Unrecorded { leave, claim };

// That the volumes are this directory's, now and on record for copies of it. `shards`: how many a save puts
// on each volume; where there are none, the record of a volume may fail to be written.
Status claim_volumes(const StoreDescriptor& descriptor, const std::string& directory,
                     std::span<const std::uint64_t> shards, Unrecorded unrecorded, const DirectoryOps& ops);

struct Adopted {
  std::vector<std::string> volumes;  // that belong to this directory now
  std::vector<std::string> missing;  // that are not there, and stay as they are
};

// Store::adopt(), with the lock held: the volumes that the descriptor or a manifest of the directory names.
Result<Adopted> adopt_volumes(const std::string& directory, const DirectoryOps& ops);

}  // namespace trunkline::checkpoint
