// One save into a directory of checkpoints.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/directory_lock.h"
#include "checkpoint/garbage_collector.h"
#include "checkpoint/held_directories.h"
#include "checkpoint/manifest.h"
#include "checkpoint/placement.h"
#include "checkpoint/retention.h"
#include "checkpoint/shard_links.h"
#include "checkpoint/store_state.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Begun by Store::begin(), and under way until release() or abandon(): commit(), retain(), release(). As long
// as it is, this process alone may change the directory. Every member function is thread-safe. It may outlive
// its Store.
//
// When the process forks, the save stays the parent's: for the child it has ended, and what the child does
// with it, dropping it included, changes nothing.
class SaveTransaction {
 public:
  SaveTransaction(const SaveTransaction&) = delete;
  SaveTransaction& operator=(const SaveTransaction&) = delete;
  // release(), not abandon(): a save that is dropped, perhaps while an exception unwinds, does not
  // say that all writers of its shards are done, and cannot be told what could not be removed. What stays is
  // debris, which the next one to open the directory collects.
  ~SaveTransaction();

  std::uint64_t step() const { return step_; }
  const Placement& placement() const { return placement_; }

  // Before commit(): links shards of an earlier checkpoint into the directories of this one (shard_links.h).
  // The manifest may name those that were linked; commit() removes the others. Fails once the save has ended
  // or its places are not those of begin().
  Result<ShardLinks> link_shards(const Manifest& base, std::span<const std::uint64_t> wanted);

  // Makes the shards that were written the checkpoint of the step, durably; an earlier one of the same step
  // is replaced. Gives the manifest its `commit` (returned) and `time`. Every shard must be there with its
  // size, and be durable. On an error it is open whether the checkpoint is there, and it may be tried again;
  // the one before it of the same step is there in any case. Fails with invalid_argument once it has
  // succeeded, and once the save has ended. The number of the commit is at least `first_number`.
  Result<std::uint64_t> commit(Manifest manifest, std::uint64_t first_number = 1);

  // The same for a copy of a checkpoint of another directory, whose shards were copied to the paths of the
  // placement, in their order. It gets the number that it has there, so that the numbers of both directories
  // can be compared: fails with system (EEXIST) if the directory has that number or a higher one.
  Result<std::uint64_t> commit_copy(const Manifest& original);

  // After commit(), else invalid_argument: removes what it replaced, and with `keep` (from 1) all but `keep`
  // of those checkpoints that the store loaded or saved: first those of later steps than the one that was
  // saved, which the run has gone back behind, then the others, both in the order of their commits.
  // Checkpoints that it neither loaded nor saved may be all that is left of another run: they do not count
  // and are left alone, which is a problem (EEXIST) once. One whose manifest is damaged is left alone as
  // well.
  // `also` names others that stay: a checkpoint is removed only if none of the rules keeps it. One without
  // the metric, or whose value is not a number, is not among the best.
  Result<CollectionResult> retain(std::optional<std::uint64_t> keep, const AlsoKeep& also = {});

  // Ends the save; nothing if it has ended. What was written and not committed stays for Store::collect().
  void release();

  // The same, and removes what was written and not committed. All writers of shards must be done.
  Result<CollectionResult> abandon();

 private:
  friend class Store;

  enum class Phase {
    writing,    // no manifest of this save is there
    uncertain,  // commit() failed when the manifest of `number_` may have got its name, maybe not durably
    committed,  // as `number_`
    ended,      // the lock is released
  };

  // What Store::begin() has prepared. The state's mutex is locked, and no other save is under way.
  SaveTransaction(std::shared_ptr<StoreState> state, std::unique_ptr<DirectoryLock> lock,
                  HeldDirectories directories, std::uint64_t step, Placement placement);

  std::unique_lock<std::mutex> enter();
  Result<std::uint64_t> commit_as(Manifest manifest, std::optional<std::uint64_t> number,
                                  std::uint64_t first_number);
  void end();
  Status check_places();
  Status check_shards(const Manifest& manifest) const;
  Status remove_unused_links(const Manifest& manifest);
  Status sync_directories(const Manifest& manifest) const;
  Status write_manifest(const Commit& commit, const std::string& text);
  Status confirm(const Commit& commit, bool replaces);
  void withdraw_manifest(const Commit& commit);
  Result<CollectionResult> remove_uncommitted();

  const std::shared_ptr<StoreState> state_;
  const std::uint64_t step_;
  const Placement placement_;
  // Guarded by the state's mutex.
  Phase phase_ = Phase::writing;
  std::uint64_t number_ = 0;
  std::string manifest_like_;  // a file whose access rights the manifest gets; empty: of what it replaces
  std::vector<std::string> links_;  // paths
  std::unique_ptr<DirectoryLock> lock_;
  HeldDirectories directories_;  // into which shards are written; the first, the manifest
};

}  // namespace trunkline::checkpoint
