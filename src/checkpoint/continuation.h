// Which checkpoints of a directory a store may overwrite: those that it loaded or saved. Others may be all
// that is left of a good run.
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

// Identifies a checkpoint. Step and number are not enough: once the newest checkpoint is deleted, its number
// is used again, maybe by another job and for the same step.
struct Commit {
  std::uint64_t step = 0;
  std::uint64_t number = 0;
  std::string first_line = {};  // of its manifest, with the checksum of the rest

  auto operator<=>(const Commit&) const = default;
};

// The contents of a directory at some time: the newest commit of each step.
struct Position {
  std::string id;  // of its descriptor; empty: there is none
  // The step that was committed last, even if its manifest is damaged. Read together with `commits`: read
  // separately, it could be older than a commit that another job makes in between, which would then count as
  // loaded.
  std::optional<std::uint64_t> latest = {};
  std::set<Commit> commits = {};
};

using DirectoryId = std::pair<std::uint64_t, std::uint64_t>;  // device and inode; zeros: it does not exist

// Holds commits rather than times, since clocks jump. Commit numbers may repeat, and a directory with another
// descriptor belongs to another run, so the descriptor's id is kept with them.
struct Continuation {
  Position loaded = {};
  std::set<Commit> saved = {};  // by this store
  DirectoryId directory = {};   // at the last load or save

  bool knows(const Commit& commit) const { return loaded.commits.contains(commit) || saved.contains(commit); }
  std::uint64_t newest_number() const;
  bool is_empty() const { return loaded.commits.empty() && saved.empty(); }
};

Result<Position> position_of(const std::string& directory);
DirectoryId directory_id_of(const std::string& directory);

// Whether the directory was replaced: the path now leads to another one than at the last load or save,
// without any of the checkpoints in `known`: it was redirected, or the directory was removed.
bool was_replaced(const std::string& directory, std::span<const StepEntry> entries,
                  const Continuation& known);

// The newest commit of a step. Fails when its manifest cannot be read; with system (ENOENT) when it was
// removed or is a dangling link.
Result<Commit> newest_commit(const std::string& directory, const StepEntry& entry);

// Each fails with system (EEXIST) when the step's directory must not be saved into: it holds files of
// torch.distributed.checkpoint, or it is a symbolic link, which may lead to another run's directory.
Status check_not_of_dcp(const std::string& directory, std::uint64_t step);
Status check_not_a_link(const std::string& directory, std::uint64_t step);

// Fails with system (EEXIST) when the directory has checkpoints of `step` or later steps that are not in
// `known`: the save would destroy them by replacing them or by retention. Also fails when it has any
// checkpoint and its descriptor is not the one in `known`: then another run has started over there. `id` and
// `first_commit` are those of the existing descriptor; checkpoints with a lower commit were moved back from a
// run that was set aside. Retention never removes those, so only saving over them is rejected. A checkpoint
// is recognized by its name alone, so that one with a damaged manifest is safe as well.
Status check_continues(const std::string& directory, const std::string& id, std::uint64_t step,
                       std::span<const StepEntry> entries, const Continuation& known,
                       std::uint64_t first_commit);

}  // namespace trunkline::checkpoint
