// The contents of a directory of checkpoints. Only reads; others may change the directory at the same time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/listing_cache.h"
#include "checkpoint/manifest.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Names in a directory, sorted; empty if it does not exist.
Result<std::vector<std::string>> names_in(const std::string& directory);

// A directory of a step. It is a checkpoint if it has a commit.
struct StepEntry {
  std::uint64_t step = 0;
  std::vector<std::uint64_t> commits;  // of the manifests in it, ascending; the last one counts
  bool operator==(const StepEntry&) const = default;
};

// Steps with a directory in `directory`, ascending.
Result<std::vector<std::uint64_t>> step_directories_in(const std::string& directory);
Result<std::vector<std::uint64_t>> commits_in(const std::string& directory, std::uint64_t step);
Result<std::vector<StepEntry>> list_steps(const std::string& directory);

// The same, with what `cache` has from earlier listings of this directory.
Result<std::vector<StepEntry>> list_steps(const std::string& directory, ListingCache& cache);

// The commit number of the next save: above all in `entries` and not below `first`. Where there are none,
// also above those of the runs that were set aside: a step that someone moves back from there is older than
// what that save commits, and must not become the latest.
std::uint64_t next_commit(const std::string& directory, std::span<const StepEntry> entries,
                          std::uint64_t first);

// The step that was committed last.
std::optional<std::uint64_t> latest_of(std::span<const StepEntry> entries);

// "steps 1, 2, 3, ..., 97, 98, 99"; `steps` is not empty.
std::string in_words(std::span<const std::uint64_t> steps);

// "it has steps 1, 2, 3, ..., 97, 98, 99": for errors about a step that does not exist.
std::string steps_in_words(const std::string& directory);

// system (ENOENT), listing the steps that exist.
std::unexpected<Error> no_checkpoint_of(const std::string& directory, std::uint64_t step);

std::string manifest_path(const std::string& directory, std::uint64_t step, std::uint64_t commit);

// The directory of a step on one of its manifest's volumes; `directory` is the one that contains the
// manifest's directory.
std::string volume_step_directory(const std::string& directory, const std::string& volume,
                                  std::uint64_t step);
std::string shard_path(const std::string& directory, const Manifest& manifest, std::size_t shard);

// The manifest of exactly this commit; `corrupt` when it claims to be another.
Result<Manifest> read_manifest_of(const std::string& directory, std::uint64_t step, std::uint64_t commit);

// The manifest of the step's last commit; system (ENOENT) when, and only when, it has none.
Result<Manifest> read_newest_manifest(const std::string& directory, std::uint64_t step);

// A manifest's first line, or as much of it as there is.
Result<std::string> read_first_line(const std::string& directory, std::uint64_t step, std::uint64_t commit);

// Whether the manifest can be read and matches its checksum; cheaper than parsing it.
Status check_manifest(const std::string& directory, std::uint64_t step, std::uint64_t commit);

}  // namespace trunkline::checkpoint
