// Removing checkpoints, and what no checkpoint refers to. Who sweeps holds the lock of the directory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/changes.h"
#include "checkpoint/listing.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

struct Removed {
  std::string path;         // of a file or a directory
  std::uint64_t bytes = 0;  // of a file
};

struct SweepResult {
  bool busy = false;                      // another process saves into the directory: nothing was done
  std::vector<Removed> removed;           // in the order in which it was done; with dry_run, what would be
  std::vector<Error> problems;            // one for each step that was left alone, or where removing failed
  std::set<std::string> missing_volumes;  // where shards of steps that are removed may still lie

  std::uint64_t bytes() const;
};

// A step that is a symbolic link lies elsewhere, maybe in the directory of another run: to remove it is to
// remove the link, and nothing behind it is touched.
//
// Shards of a step on volumes stay as long as a manifest below the directory names them, wherever it was
// moved or copied to (shard_references.h). Where the directory of the step itself is gone, somebody moved or
// removed it by hand, since saves make it first and remove it last: its shards are orphans, which only
// Orphans::remove removes.
class Sweep {
 public:
  enum class DryRun { no, yes };
  enum class Orphans { leave, remove };

  // Nothing is removed from a volume without a record of whose it is, which is a problem: only a save records
  // that (home.h), and a directory that does not save may be a copy.
  Sweep(std::string directory, StoreDescriptor descriptor, Changes changes, DryRun dry_run,
        Orphans orphans = Orphans::leave);

  // Removes a checkpoint; one whose manifest cannot be read is left alone and is a problem.
  void remove(const StepEntry& entry);

  // The same, asked for by name: without a manifest that can be read, of the shards on volumes those in the
  // directories of the descriptor go.
  void remove_whatever_it_is(const StepEntry& entry);

  // Leaves of a step what its last manifest refers to, and of one without manifests nothing. A step whose
  // last manifest cannot be read is left alone and is a problem. A large manifest is not read, but for its
  // first line, where the names of the files show that none of them can go. Files that no save makes are
  // never touched.
  void clean(const StepEntry& entry);

  // All steps, those that only volumes have a directory of, and files that were not given their names.
  // Orphans that are left are problems.
  void clean_all();

  SweepResult take_result() { return std::move(result_); }

 private:
  // A directory in which files of a step lie.
  struct Place {
    std::string path;
    std::string volume;               // on which it lies; empty: in the directory itself
    bool own = false;                 // else only files of `known` are removed
    std::vector<std::string> known;   // those that the manifest in question names, sorted
    std::set<std::string> kept = {};  // shards that stay
  };

  bool is_one_save(const StepEntry& entry) const;
  std::vector<Place> places_of(std::uint64_t step, const Manifest* manifest) const;
  Status check_homes(const std::vector<Place>& places);
  Status find_kept(std::vector<Place>& places, const Manifest* kept);
  Status find_kept_on_volume(Place& place);
  std::vector<std::string> missing_volumes(const std::vector<Place>& places, bool names_are_known) const;
  Status sweep(const StepEntry& entry, const Manifest* kept, const Manifest* doomed);
  Status sweep_volumes(const std::vector<Place>& places, bool keep_known);
  bool is_link(const StepEntry& entry) const;
  Status remove_link(const StepEntry& entry);
  Status sweep_left_behind(std::uint64_t step);
  Status sweep_place(const Place& place, bool keep_known, bool keep_directory = false);
  Status check_orphans(std::uint64_t step);
  void clean_volume(const std::string& volume, std::set<std::uint64_t>& seen);
  Status remove_file(const std::string& path);
  Result<bool> remove_debris(const std::string& directory, const std::string& name);
  Status remove_temporary_files(const std::string& directory);
  void note(Status status);

  std::string directory_;
  StoreDescriptor descriptor_;
  Changes changes_;
  DryRun dry_run_;
  Orphans orphans_;
  std::map<std::string, Status> homes_;  // of volumes: whether anything there may be removed
  std::optional<Result<std::set<std::string>>> named_below_;  // shards_named_below(), once it was needed
  SweepResult result_;
};

}  // namespace trunkline::checkpoint
