// Removes checkpoints, and files that no checkpoint refers to. The caller holds the lock of the directory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/directory_ops.h"
#include "checkpoint/listing.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

struct Removed {
  std::string path;         // of a file or a directory
  std::uint64_t bytes = 0;  // of a file
};

struct CollectionResult {
  bool is_busy = false;          // another process is saving into the directory: the rest was not done
  std::vector<Removed> removed;  // in order of removal; with dry_run, what would be removed
  std::vector<Error> problems;   // one for each step that was left alone, or where removing failed
  std::set<std::string> missing_volumes;  // which may still hold shards of steps that are removed

  std::uint64_t bytes() const;
  void add(CollectionResult later);  // adds the next part of the same collection
};

// The progress of a collection that is made in parts, so that others can lock the directory between them.
struct CollectionProgress {
  std::function<bool()> should_pause;  // called after each step
  // Steps of the directory at the beginning: those saved during the pauses have no debris, and would keep the
  // collection from ending.
  std::optional<std::set<std::uint64_t>> listed = {};
  std::set<std::string> searched = {};  // directories whose temporary files were removed
  std::set<std::uint64_t> done = {};    // steps that need not be examined again
};

// A step that is a symbolic link is stored elsewhere, maybe in the directory of another run: removing it
// removes only the link, and nothing behind it is touched.
//
// Shards of a step on volumes stay as long as a manifest below the directory names them, wherever it was
// moved or copied to (shard_references.h). Where the directory of the step itself is gone, someone moved or
// removed it by hand, since saves create it first and remove it last: its shards are orphans, which only
// Orphans::remove removes.
class GarbageCollector {
 public:
  enum class DryRun { no, yes };
  enum class Orphans { leave, remove };

  // Nothing is removed from a volume that has no record of its owner, which is reported as a problem: only a
  // save records that (volume_owner.h), and a directory that is not saved into may be a copy.
  GarbageCollector(std::string directory, StoreDescriptor descriptor, DirectoryOps ops, DryRun dry_run,
                   Orphans orphans = Orphans::leave);

  // Removes a checkpoint; one whose manifest cannot be read is left alone and reported as a problem.
  void remove(const StepEntry& entry);

  // For an explicit request. If the manifest cannot be read, removes only those shards on volumes that are in
  // the descriptor's directories.
  void remove_whatever_it_is(const StepEntry& entry);

  // Keeps what a step's last manifest refers to; a step without manifests is removed entirely. A step whose
  // last manifest cannot be read is left alone and reported as a problem. Of a large manifest only the first
  // line is read where the file names show that nothing can be removed. Files that no save creates are never
  // touched.
  void clean(const StepEntry& entry);

  // Cleans all steps, including those that exist only on volumes, and removes temporary files. Remaining
  // orphans are problems.
  void clean_all();

  // The same, continuing from `progress`; returns false if it paused. The directory may change during the
  // pause, which outdates what this object has read, so another collector must continue.
  bool clean_all(CollectionProgress& progress);

  // For a first save that ended before the directory had its descriptor.
  void clean_unbegun();

  CollectionResult take_result() { return std::move(result_); }

 private:
  // A directory that contains files of a step.
  struct StepDirectory {
    std::string path;
    std::string volume;               // on which it is; empty: the directory of checkpoints itself
    bool own = false;                 // otherwise only files in `known` are removed
    std::vector<std::string> known;   // those that the manifest in question names, sorted
    std::set<std::string> kept = {};  // shards that stay
  };

  bool is_one_save(const StepEntry& entry) const;
  // The first one is always in the directory of checkpoints itself.
  std::vector<StepDirectory> directories_of(std::uint64_t step, const Manifest* manifest) const;
  Status check_owners(const std::vector<StepDirectory>& directories);
  Status find_kept(std::vector<StepDirectory>& directories, const Manifest* kept);
  Status find_kept_on_volume(StepDirectory& directory);
  std::vector<std::string> missing_volumes(const std::vector<StepDirectory>& directories,
                                           bool names_are_known) const;
  Status collect(const StepEntry& entry, const Manifest* kept, const Manifest* doomed);
  Status clean_volumes(const std::vector<StepDirectory>& directories, bool step_stays);
  bool is_link(const StepEntry& entry) const;
  Status remove_link(const StepEntry& entry);
  Status remove_left_behind(std::uint64_t step);
  Status clean_directory(const StepDirectory& directory, bool step_stays, bool keep_directory = false);
  Status check_orphans(std::uint64_t step);
  bool clean_volume(const std::string& volume, CollectionProgress& progress);
  Status remove_file(const std::string& path, std::string_view why);
  Result<bool> remove_debris(const std::string& directory, const std::string& name);
  Status remove_temporary_files(const std::string& directory);
  void note(Status status);

  std::string directory_;
  StoreDescriptor descriptor_;
  DirectoryOps ops_;
  DryRun dry_run_;
  Orphans orphans_;
  std::map<std::string, Status> owners_;  // by volume: whether anything there may be removed
  std::optional<Result<std::set<std::string>>> named_below_;  // shards_named_below(), once it was needed
  CollectionResult result_;
};

}  // namespace trunkline::checkpoint
