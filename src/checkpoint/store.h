// A directory of checkpoints (docs/formats/checkpoint.md): one directory a step, of which any number may be
// read while one process saves.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/continuation.h"
#include "checkpoint/directory_lock.h"
#include "checkpoint/directory_ops.h"
#include "checkpoint/garbage_collector.h"
#include "checkpoint/listing.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save_transaction.h"
#include "checkpoint/store_descriptor.h"
#include "checkpoint/store_state.h"
#include "checkpoint/tier_record.h"
#include "checkpoint/volume_claims.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

enum class IfMissing { create, fail };

// A collection of thousands of steps takes long on a slow disk, and a save that cannot lock the directory
// fails after a while. So it releases the lock now and then, for long enough that a save which waits gets it.
struct CollectionPace {
  // Of the first part. The others are longer, each twice as long as the one before, since each begins with
  // reading what names shards.
  std::chrono::milliseconds first_part{500};
  std::function<void()> pause = {};  // between two parts; empty: sleeps
};

struct StoreOptions {
  // Directories, best one on each disk, over which shards are spread; empty: shards lie with the manifests.
  // nullopt: as the directory has them, none in a new one.
  std::optional<std::vector<std::string>> volumes = {};
  IfMissing if_missing = IfMissing::create;
  // The first begin() sets the checkpoints that it finds aside (set_aside.h), unless continue_from() was
  // called before.
  bool fresh = false;
  DirectoryOps::Watch watch = {};
  CollectionPace collection_pace = {};
};

// Defined in store.cpp, store_open.cpp (opening, the descriptor, continuing) and store_removal.cpp.
//
// Every member function is thread-safe. A save goes Store::begin(), SaveTransaction::commit(), retain(),
// release(); from begin() on this process alone may change the directory. Reading needs no lock: it sees a
// step as it was before a commit or as it is after it. Shards that a reader has open stay readable when they
// are removed; one that opens them late finds them gone and reads the manifest again. A save that is under
// way when the process forks is the parent's: the child has begun none, and the lock is not its own.
class Store {
 public:
  // Only reads: begin() makes the directory, its descriptor and the directories on volumes. A directory that
  // is missing has no steps; without IfMissing::create it is system (ENOENT), as is one with neither a
  // descriptor nor steps. With it, a directory that holds other files instead is refused (ENOTEMPTY), so that
  // a mistyped path is noticed before anything is written. Volumes that differ from those of the directory
  // take effect at the next save; without IfMissing::create they are an invalid_argument.
  static Result<std::unique_ptr<Store>> open(const std::string& directory, const StoreOptions& options = {});

  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  ~Store();

  const std::string& directory() const { return state_->directory; }  // absolute
  // As the next save has it; another process may change it before.
  StoreDescriptor descriptor();

  // The directories that its checkpoints are copied to, as record_tiers() has recorded them.
  Result<std::vector<RecordedTier>> tiers() const;
  // Whether the record came with a copy of the directory: it was written for another one.
  Result<bool> has_copied_tiers() const;
  // Durably, once a save has made the directory.
  Status record_tiers(const std::vector<RecordedTier>& tiers);

  Result<std::vector<std::uint64_t>> steps() const;          // ascending
  Result<std::optional<std::uint64_t>> latest() const;       // the step that was committed last
  Result<Manifest> read_manifest(std::uint64_t step) const;  // system (ENOENT) when there is no such step

  // Which checkpoints begin() may find in its way: those up to a position, once they were loaded, and those
  // that this store saved. position() is to be asked for before loading, and
  // says which is the latest: what others save meanwhile is theirs.
  Result<Position> position() const;
  void continue_from(Position position);
  // Forgets them, for a run that begins anew; `fresh` as in StoreOptions.
  void start_over(bool fresh);
  // What begin() would say now; system (EEXIST) as there. Changes nothing.
  Status check_continues(std::uint64_t step);

  // Makes the directories of the step, durably, and before them what the directory itself lacks. `shards`:
  // how many on each volume (one number without volumes). Fails with system (EBUSY) while a save is under
  // way, of another or of this store; with EAGAIN when another process has changed the number of volumes
  // (call it again with the new one); with EEXIST, having changed nothing, when there are checkpoints of this
  // step or later ones that this store has neither loaded nor saved, or the directory of the step is a
  // symbolic link; with unsupported in a copy of a directory whose shards lie on volumes (volume_owner.h).
  Result<std::unique_ptr<SaveTransaction>> begin(std::uint64_t step, std::span<const std::uint64_t> shards);

  // The folder that a begin() has set the earlier run aside in, until a save is committed: an error of that
  // save should say where the run is.
  std::optional<std::string> aside();

  // Removes the checkpoint of a step, durably, whatever its manifest is like, and with what it replaced.
  // Fails with system: ENOENT when there is no such checkpoint, EBUSY while somebody saves; unsupported in a
  // copy, as begin(). The first thing that cannot be removed is the error, and what follows it stays for
  // collect().
  Status remove(std::uint64_t step);

  // Removes debris of saves that were cut off: shards that no manifest names, replaced manifests, temporary
  // files, empty directories of steps. Nothing while somebody saves, and nothing more once somebody begins
  // a save in a pause (CollectionPace): `is_busy`; unsupported in a copy, as begin(). Nothing either in a
  // directory with neither a descriptor nor steps. `orphans`: shards on volumes whose step was moved or
  // removed by hand.
  Result<CollectionResult> collect(GarbageCollector::DryRun dry_run = GarbageCollector::DryRun::no,
                                   GarbageCollector::Orphans orphans = GarbageCollector::Orphans::leave);

  // Records this directory as the one that its volumes belong to, in place of another that is gone or was
  // given up: a copy of it can be saved into from then on. Fails with EBUSY while somebody saves, and with
  // unsupported where the original is still in its place (volume_owner.h).
  Result<Adopted> adopt();

  // For those who open the directory, maybe only to read: the same as collect() where a save has been begun
  // before, so that no lock has to be made, and where the lock excludes every writer: on a filesystem of this
  // machine, which has locks. Else nothing.
  Result<CollectionResult> collect_if_used();

 private:
  using Volumes = std::optional<std::vector<std::string>>;

  Store(std::string directory, Volumes volumes, DirectoryOps ops, CollectionPace collection_pace);
  enum class Occasion { asked, dry_run, opening };
  Result<CollectionResult> collect_garbage(Occasion occasion, GarbageCollector::Orphans orphans);
  Result<CollectionResult> collect_part(Occasion occasion, GarbageCollector::Orphans orphans,
                                        CollectionProgress& progress, bool& is_paused);
  Status make_directory();
  Status check_device() const;
  StoreDescriptor next_descriptor(const std::optional<StoreDescriptor>& recorded) const;
  void follow_own_descriptor(const std::optional<StoreDescriptor>& recorded);
  // What a save finds in the directory.
  struct EarlierSteps {
    bool none = false;  // no step has a manifest
    // What is known is of another descriptor, and says nothing about what is there. Forgotten only once the
    // save has begun: a begin() that fails before leaves a run whose directory another one has taken as it
    // was, to be refused again.
    bool of_another_run = false;
    bool directory_was_replaced = false;  // was_replaced()
  };
  // `ops` of these: the state's, which fail once the lock is not what others meet.
  Result<EarlierSteps> prepare_directory(std::uint64_t step, std::span<const std::uint64_t> shards,
                                         DirectoryLock& lock, const DirectoryOps& ops);
  Result<EarlierSteps> settle_earlier_steps(std::uint64_t step, const DirectoryLock& lock,
                                            const DirectoryOps& ops);
  Status record_descriptor(const EarlierSteps& earlier, const DirectoryOps& ops);

  const Volumes volumes_;  // StoreOptions::volumes
  const CollectionPace collection_pace_;
  const std::shared_ptr<StoreState> state_;  // its mutex guards what follows as well
  bool recorded_ = false;                    // the descriptor has been in the directory
  std::optional<std::uint64_t> device_;      // on which the directory was
  bool fresh_ = false;                       // what is in the directory goes aside
};

}  // namespace trunkline::checkpoint
