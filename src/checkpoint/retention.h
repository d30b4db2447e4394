// Which checkpoints go once another one is committed.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "checkpoint/continuation.h"
#include "checkpoint/directory_ops.h"
#include "checkpoint/garbage_collector.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

struct Retention {
  std::string directory;
  StoreDescriptor descriptor;
  std::uint64_t step = 0;             // that was saved
  std::uint64_t commit = 0;           // its number
  std::optional<std::uint64_t> keep;  // at least 1
};

// SaveTransaction::retain(), with the lock held, which `ops` check. `known`: the checkpoints that may go.
// `reported`: those that were left alone and have been a problem once; gets what is one now.
Result<CollectionResult> remove_superseded(const Retention& retention, const Continuation& known,
                                           std::set<Commit>& reported, const DirectoryOps& ops);

}  // namespace trunkline::checkpoint
