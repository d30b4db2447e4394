// Which checkpoints of a directory a store goes on from: those that were loaded, and those that it saved.
// Others are not its to overwrite: they may be all that is left of a good run.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>

#include "checkpoint/listing.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// The newest commit of a directory.
struct Position {
  std::string id;            // of its descriptor; empty: it has none
  std::uint64_t commit = 0;  // 0: there is none
};

// Commits, not times: clocks jump. Commits begin anew with every descriptor, so that they go with its id.
struct Continuation {
  Position loaded = {};
  std::set<std::uint64_t> saved = {};  // commits of this store

  bool knows(std::uint64_t commit) const { return commit <= loaded.commit || saved.contains(commit); }
  bool is_empty() const { return loaded.commit == 0 && saved.empty(); }
};

Result<Position> newest_position(const std::string& directory);

// Fails with system (EEXIST) when the directory has checkpoints of `step` or later steps that `known` does
// not know: by what it replaces and retention removes, the save would be the end of them. A checkpoint counts
// by its name alone, so that one whose manifest is damaged is safe as well.
Status check_continues(const std::string& directory, std::uint64_t step, std::span<const StepEntry> entries,
                       const Continuation& known);

}  // namespace trunkline::checkpoint
