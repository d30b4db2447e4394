// Which checkpoints of a directory a store goes on from: those that were loaded, and those that it saved.
// Others are not its to overwrite: they may be all that is left of a good run.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "checkpoint/listing.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// A checkpoint. Step and number are not enough: once the newest checkpoint is deleted, its number is used
// again, maybe by another job and for the same step.
struct Commit {
  std::uint64_t step = 0;
  std::uint64_t number = 0;
  std::string first_line = {};  // of its manifest, with the checksum of all else

  auto operator<=>(const Commit&) const = default;
};

// What a directory holds at some time: the newest commit of each step.
struct Position {
  std::string id;  // of its descriptor; empty: it has none
  // The step that was committed last, also where its manifest is damaged. A run that loads it has loaded what
  // `commits` says: asked for apart, it could be older than what another job commits in between.
  std::optional<std::uint64_t> latest = {};
  std::set<Commit> commits = {};
};

using DirectoryId = std::pair<std::uint64_t, std::uint64_t>;  // device and inode; zeros: it is not there

// Commits, not times: clocks jump. Their numbers may repeat, and a directory with another descriptor is
// another run's, so that they go with its id.
struct Continuation {
  Position loaded = {};
  std::set<Commit> saved = {};  // by this store
  DirectoryId directory = {};   // as it was at the last load or save

  bool knows(const Commit& commit) const { return loaded.commits.contains(commit) || saved.contains(commit); }
  std::uint64_t newest_number() const;
  bool is_empty() const { return loaded.commits.empty() && saved.empty(); }
};

Result<Position> position_of(const std::string& directory);
DirectoryId directory_id_of(const std::string& directory);

// Whether the directory is another one than at the last load or save, and has none of the checkpoints that
// `known` is about: its path leads elsewhere now, or it was removed.
bool is_elsewhere(const std::string& directory, std::span<const StepEntry> entries,
                  const Continuation& known);

// The newest commit of a step. Fails when its manifest cannot be read, with system (ENOENT) when it has gone
// or is a link that leads nowhere.
Result<Commit> newest_commit(const std::string& directory, const StepEntry& entry);

// Each fails with system (EEXIST) when the directory of the step is not one to save into: it holds files of
// torch.distributed.checkpoint, or is a symbolic link, behind which may be another run's.
Status check_not_of_dcp(const std::string& directory, std::uint64_t step);
Status check_not_a_link(const std::string& directory, std::uint64_t step);

// Fails with system (EEXIST) when the directory has checkpoints of `step` or later steps that `known` does
// not know: by what it replaces and retention removes, the save would be the end of them. Likewise when it
// has any, and its descriptor is another than the one that `known` is about: then another run has started
// over there. `id` and `first_commit`: of the descriptor that is there; what has a lower commit was moved
// back from a run that was set aside, which retention never removes, so that only saving over it is refused.
// A checkpoint counts by its name alone, so that one whose manifest is damaged is safe as well.
Status check_continues(const std::string& directory, const std::string& id, std::uint64_t step,
                       std::span<const StepEntry> entries, const Continuation& known,
                       std::uint64_t first_commit);

}  // namespace trunkline::checkpoint
