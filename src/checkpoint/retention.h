// Which checkpoints go once another one is committed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/continuation.h"
#include "checkpoint/directory_ops.h"
#include "checkpoint/garbage_collector.h"
#include "checkpoint/listing.h"
#include "checkpoint/manifest.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Checkpoints with the best values of a metric.
struct BestRule {
  enum class Order { min, max };  // which values are better

  std::string metric;
  Order order = Order::min;
  std::uint64_t count = 1;
};

// Which checkpoints stay beside the last ones.
struct AlsoKeep {
  std::optional<std::uint64_t> every = {};  // whose steps are multiples of this, from 1
  std::optional<BestRule> best = {};
  std::set<std::uint64_t> steps = {};  // that somebody still needs, such as one who copies them
};

// Metrics of checkpoints that were read before: a manifest is not read again for each save.
using KnownMetrics = std::map<Commit, std::vector<Metric>>;

struct Retention {
  std::string directory;
  StoreDescriptor descriptor;
  std::uint64_t step = 0;             // that was saved
  std::uint64_t commit = 0;           // its number
  std::optional<std::uint64_t> keep;  // at least 1
  AlsoKeep also = {};
};

// What retention remembers from one save to the next.
struct RetentionMemory {
  std::set<Commit> reported = {};  // that were left alone and have been a problem once
  KnownMetrics metrics = {};
};

// SaveTransaction::retain(), with the lock held, which `ops` check. `entries`: the steps of the directory, or
// only the one that was saved if no other may go. `known`: the checkpoints that may go.
CollectionResult remove_superseded(const Retention& retention, std::vector<StepEntry> entries,
                                   const Continuation& known, RetentionMemory& memory,
                                   const DirectoryOps& ops);

}  // namespace trunkline::checkpoint
