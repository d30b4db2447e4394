#include "checkpoint/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <limits>
#include <numeric>
#include <ranges>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "checkpoint/descriptor_io.h"
#include "checkpoint/directory_lock.h"
#include "checkpoint/held_directories.h"
#include "checkpoint/names.h"
#include "checkpoint/own_directory.h"
#include "checkpoint/shard_references.h"
#include "checkpoint/volume_owner.h"

namespace trunkline::checkpoint {
namespace {

constexpr std::uint64_t kMaxShards = 1 << 20;

std::unexpected<Error> invalid(std::string message) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, std::move(message)));
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

bool is_directory(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

Error not_removed(const std::string& directory, std::span<const Commit> commits, std::uint64_t keep) {
  std::vector<std::uint64_t> steps;
  for (const Commit& commit : commits) steps.push_back(commit.step);
  std::ranges::sort(steps);
  return {
      .kind = ErrorKind::system,
      .code = EEXIST,
      .message = fmt::format(
          "{}: keep={} does not count or remove {}, which this Checkpointer has not loaded or saved, or "
          "which "
          "came back from a folder aside-*. delete() removes checkpoints; to continue an earlier run, call "
          "load() before the first save, and use one Checkpointer for all saves",
          directory, keep, in_words(steps)),
      .path = directory};
}

std::unexpected<Error> other_volumes(const std::string& directory) {
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = EAGAIN,
            .message = fmt::format(
                "{}: another process has given the directory other volumes; begin the save again", directory),
            .path = directory});
}

Error volume_is_missing(const std::string& volume) {
  return Error{
      .kind = ErrorKind::system,
      .code = ENOENT,
      .message = fmt::format("{} is missing: ENOENT; shards of steps that were removed may lie on it. "
                             "Mount its volume and run gc again. If that disk is lost for good, remove the "
                             "directories of steps without a manifest",
                             volume),
      .path = volume};
}

}  // namespace

struct Store::Save {
  // Whether the lock is still the one that others meet.
  Status check_lock() { return lock->check_or_renew(); }

  // Whether all paths lead to where the shards were written. Volumes that this save does not write to may
  // come and go.
  Status check_places() {
    if (auto same = check_lock(); !same) return same;
    return directories.check();
  }

  // In the directory that was written to, whatever its path leads to.
  void remove_manifest(const std::string& path) const {
    directories.remove_file_from_first(std::filesystem::path(path).filename().string());
  }

  std::unique_ptr<DirectoryLock> lock;
  HeldDirectories directories = {};  // into which shards are written; the first, the manifest
  std::uint64_t step = 0;
  std::optional<std::uint64_t> attempted = {};  // whose manifest may be there, though maybe not durably
  std::optional<std::uint64_t> committed = {};
};

Store::Store(std::string directory, Volumes volumes, DirectoryOps ops, CollectionPace collection_pace)
    : directory_(std::move(directory)),
      volumes_(std::move(volumes)),
      ops_(std::move(ops)),
      collection_pace_(std::move(collection_pace)) {}

Store::~Store() = default;

std::unique_lock<std::mutex> Store::enter() {
  ownership_.take_over([this] {
    // What its parent was doing. The mutex may be held forever by a thread that the child does not have.
    save_.reset();
    std::construct_at(&mutex_);
  });
  return std::unique_lock(mutex_);
}

Result<std::vector<std::uint64_t>> Store::steps() const {
  const auto entries = list_steps(directory_);
  if (!entries) return std::unexpected(entries.error());
  std::vector<std::uint64_t> steps;
  for (const StepEntry& entry : *entries) {
    if (!entry.commits.empty()) steps.push_back(entry.step);
  }
  return steps;
}

Result<std::optional<std::uint64_t>> Store::latest() const {
  const auto entries = list_steps(directory_);
  if (!entries) return std::unexpected(entries.error());
  return latest_of(*entries);
}

Result<Manifest> Store::read_manifest(std::uint64_t step) const {
  return read_newest_manifest(directory_, step);
}

// That the volumes are this directory's, now and on record for copies of it. `shards` as for begin().
Status Store::claim_volumes(const StoreDescriptor& descriptor, std::span<const std::uint64_t> shards,
                            Unrecorded unrecorded, const DirectoryOps& ops) const {
  if (auto ours = check_owners(descriptor, directory_); !ours) return ours;
  for (const auto* volumes : {&descriptor.volumes, &descriptor.former_volumes}) {
    for (std::size_t i = 0; i < volumes->size(); ++i) {
      if (!is_directory((*volumes)[i])) continue;
      if (unrecorded == Unrecorded::leave && !check_recorded_owner((*volumes)[i], directory_)) continue;
      auto taken = record_owner((*volumes)[i], directory_, ops);
      const bool written_to = volumes == &descriptor.volumes && shards[i] > 0;
      if (!taken && (written_to || taken.error().kind != ErrorKind::system)) return taken;
    }
  }
  return {};
}

Status Store::make_step_directories(std::uint64_t step, std::span<const std::uint64_t> shards,
                                    const DirectoryOps& ops) const {
  // Also when they exist: the process that made them may have died before that was durable.
  const auto make = [&](const std::string& parent) -> Status {
    if (auto made = ops.make_directory(fmt::format("{}/{}", parent, step_directory(step))); !made)
      return made;
    return ops.sync_directory(parent);
  };
  // Where the directory has no such step, shards of it on volumes belong to one that was moved out: they are
  // put on record before those of this save lie beside them. Former volumes have such shards, too.
  if (!is_directory(fmt::format("{}/{}", directory_, step_directory(step)))) {
    for (const auto* volumes : {&descriptor_.volumes, &descriptor_.former_volumes}) {
      for (const std::string& volume : *volumes) {
        const std::string there = volume_step_directory(directory_, volume, step);
        if (auto kept = keep_moved_shards(there, ops); !kept) return kept;
      }
    }
  }
  if (auto made = make(directory_); !made) return made;
  for (std::size_t i = 0; i < descriptor_.volumes.size(); ++i) {
    if (shards[i] == 0) continue;
    const std::string& volume = descriptor_.volumes[i];
    if (!is_directory(volume)) {
      return std::unexpected(Error{
          .kind = ErrorKind::system,
          .code = ENOENT,
          .message = fmt::format("cannot save into {}: {} is missing: ENOENT. Mount its volume; if that "
                                 "disk is gone for good, open the directory with volumes=[...] that "
                                 "exist",
                                 directory_, volume),
          .path = volume});
    }
    if (auto made = make(volume); !made) return made;
  }
  return {};
}

Status Store::hold_directories(Save& save, std::span<const std::uint64_t> shards) const {
  if (auto held =
          save.directories.hold(volume_step_directory(directory_, std::string(kOwnVolume), save.step));
      !held)
    return held;
  for (std::size_t i = 0; i < descriptor_.volumes.size(); ++i) {
    if (shards[i] == 0) continue;
    if (auto held =
            save.directories.hold(volume_step_directory(directory_, descriptor_.volumes[i], save.step));
        !held)
      return held;
  }
  return {};
}

Result<Placement> Store::begin(std::uint64_t step, std::span<const std::uint64_t> shards) {
  const auto guard = enter();
  const std::size_t volumes = std::max<std::size_t>(1, descriptor_.volumes.size());
  if (step > kMaxNumber) return invalid("step: is beyond 2^63 - 1");
  if (shards.size() != volumes)
    return invalid(fmt::format("shards: {} numbers for {} volumes", shards.size(), volumes));
  if (std::ranges::any_of(shards, [](std::uint64_t count) { return count > kMaxShards; }))
    return invalid(fmt::format("shards: more than {} on a volume", kMaxShards));
  if (save_) return busy(directory_);  // also where the filesystem has no locks
  if (auto made = make_directory(); !made) return std::unexpected(made.error());
  auto save = std::make_unique<Save>();
  auto locked = DirectoryLock::acquire(directory_, DirectoryLock::IfMissing::create);
  if (!locked) return std::unexpected(locked.error());
  save->lock = std::move(*locked);
  save->lock->touch();
  std::ignore = ::utimensat(AT_FDCWD, fmt::format("{}/{}", directory_, kDescriptorFile).c_str(), nullptr, 0);
  save->step = step;
  // The order matters: what can be refused is refused before an earlier run is set aside, but for what is
  // only known after that: links to steps go aside with the run, and the volumes are those of the new
  // descriptor. So a begin() that fails may have set the run aside: aside(). What is checked again was not
  // locked before.
  const DirectoryOps ops = ops_.checked_by([&save] { return save->lock->check_with_volumes(); });
  if (auto ours = check_not_foreign(directory_); !ours) return std::unexpected(ours.error());
  if (auto own = check_not_of_dcp(directory_, step); !own) return std::unexpected(own.error());
  const auto before = read_store_descriptor(directory_);
  if (!before) return std::unexpected(before.error());
  if (const std::optional<StoreDescriptor>& known = *before) save->lock->hold_volumes(*known);
  const auto earlier = settle_earlier_steps(step, ops);
  if (!earlier) return std::unexpected(earlier.error());
  if (auto own = check_not_a_link(directory_, step); !own) return std::unexpected(own.error());
  if (auto recorded = record_descriptor(*earlier, ops); !recorded) return std::unexpected(recorded.error());
  save->lock->hold_volumes(descriptor_);
  if (const auto device = device_of_directory(directory_)) device_ = *device;
  if (shards.size() != std::max<std::size_t>(1, descriptor_.volumes.size())) return other_volumes(directory_);
  if (auto claimed = claim_volumes(descriptor_, shards, Unrecorded::claim, ops); !claimed)
    return std::unexpected(claimed.error());
  if (auto made = make_step_directories(step, shards, ops); !made) return std::unexpected(made.error());
  if (auto held = hold_directories(*save, shards); !held) return std::unexpected(held.error());
  // They are below the directory that is locked.
  if (auto same = save->check_lock(); !same) return std::unexpected(same.error());
  if (earlier->of_another_run) known_ = {};
  known_.loaded.id = descriptor_.id;
  known_.directory = directory_id_of(directory_);
  save_ = std::move(save);
  fresh_ = false;

  Placement placement{
      .volumes = descriptor_.volumes, .shards = {}, .paths = {}, .is_elsewhere = earlier->is_elsewhere};
  if (placement.volumes.empty()) placement.volumes.emplace_back(kOwnVolume);
  const std::string nonce = random_hex(16);
  const std::uint64_t total = std::accumulate(shards.begin(), shards.end(), std::uint64_t{0});
  for (std::size_t volume = 0; volume < shards.size(); ++volume) {
    const std::string where = volume_step_directory(directory_, placement.volumes[volume], step);
    for (std::uint64_t i = 0; i < shards[volume]; ++i) {
      const std::string file = shard_file(placement.shards.size(), total, nonce);
      placement.shards.push_back({.volume = volume, .file = file, .bytes = 0, .crc32c = {}});
      placement.paths.push_back(fmt::format("{}/{}", where, file));
    }
  }
  return placement;
}

Status Store::check_shards(const Manifest& manifest) const {
  for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
    const std::string path = shard_path(directory_, manifest, i);
    struct stat status{};
    if (::stat(path.c_str(), &status) != 0)
      return std::unexpected(
          system_error(errno, "committing a checkpoint: looking at its shard " + path, path));
    const auto bytes = static_cast<std::uint64_t>(status.st_size);
    if (!S_ISREG(status.st_mode) || bytes != manifest.shards[i].bytes) {
      return std::unexpected(make_error(
          ErrorKind::corrupt,
          fmt::format("committing a checkpoint: its shard {} has {} bytes, and the manifest says {}; save it "
                      "again",
                      path, bytes, manifest.shards[i].bytes),
          path));
    }
  }
  return {};
}

// How a checkpoint comes to be, so that it is there, whole, exactly when its manifest is, whenever a process
// is killed or the power fails:
// 1. Every shard is written under a name that no manifest knows: the directory of its step is made and
//    durable by then (begin()), and the name has a nonce of this save. A checkpoint of the same step that is
//    there already is not touched. Until a manifest names it, a shard is debris to the holder of the lock.
// 2. Each writer makes the contents of its shards durable (fsync) ...
// 3. ... then their names (fsync of the directory). It is done here again for all directories, at the cost
//    of nothing when it was done.
// 4. All ranks are done: the caller has heard from each. Here, every shard must be there with its size.
// 5. The manifest is written to a temporary name, and made durable (fsync). Its commit is larger than any
//    that the directory holds, so that of two manifests of one step the newer one counts.
// 6. It gets its name (rename, which replaces nothing).
// 7. The name is made durable (fsync of the directory). Only then, and if the lock and the directories are
//    still those of begin(), is the checkpoint reported as saved. Else the manifest is removed again, unless
//    the lock was lost and the step had one before: who took the lock may have removed that on account of it.
// 8. Only now may older ones go: retain(), in the order of GarbageCollector::collect().
Result<std::uint64_t> Store::commit(Manifest manifest) {
  const auto guard = enter();
  if (!save_ || save_->committed) return invalid("commit: no save was begun");
  if (manifest.step != save_->step)
    return invalid(fmt::format("manifest: it is of step {}, and the save of {}", manifest.step, save_->step));
  if (auto same = save_->check_places(); !same) return std::unexpected(same.error());
  const auto entries = list_steps(directory_);
  if (!entries) return std::unexpected(entries.error());
  // Above those of steps that somebody has moved out meanwhile, and may move back.
  manifest.commit =
      next_commit(directory_, *entries, std::max(descriptor_.first_commit, known_.newest_number() + 1));
  manifest.time = now();
  const auto text = format_manifest(manifest);
  if (!text) return std::unexpected(text.error());
  if (auto whole = check_shards(manifest); !whole) return std::unexpected(whole.error());
  std::set<std::string> directories{
      volume_step_directory(directory_, std::string(kOwnVolume), manifest.step)};
  for (const Shard& shard : manifest.shards)
    directories.insert(volume_step_directory(directory_, manifest.volumes[shard.volume], manifest.step));
  for (const std::string& each : directories) {
    if (auto synced = ops_.sync_directory(each); !synced) return std::unexpected(synced.error());
  }
  // All that took its time.
  if (auto same = save_->check_places(); !same) return std::unexpected(same.error());
  const std::string path = manifest_path(directory_, manifest.step, manifest.commit);
  // Before it is there: where making it durable fails, it may have its name, and the next save replaces it.
  const Commit commit{
      .step = manifest.step, .number = manifest.commit, .first_line = std::string(first_line(*text))};
  known_.saved.insert(commit);
  if (auto written = ops_.create_file_durably(path, *text); !written) {
    if (written.error().code == EEXIST)  // another process has made it
      known_.saved.erase(commit);
    else
      save_->attempted = manifest.commit;
    return std::unexpected(written.error());
  }
  // What was moved, or unlocked, before the manifest had its name may not be whole.
  if (auto same = save_->check_places(); !same) {
    save_->attempted = manifest.commit;
    const auto is_of_step = [&](const StepEntry& entry) {
      return entry.step == manifest.step && !entry.commits.empty();
    };
    // Others that took the lock may have removed an earlier checkpoint of the step on account of this one.
    if (save_->check_lock() || std::ranges::none_of(*entries, is_of_step)) {
      known_.saved.erase(commit);
      save_->remove_manifest(path);
    }
    return std::unexpected(same.error());
  }
  save_->committed = manifest.commit;
  aside_.reset();
  return manifest.commit;
}

Result<CollectionResult> Store::retain(std::optional<std::uint64_t> keep) {
  if (keep == 0U) return invalid("keep: must be at least 1, or nothing to keep all");
  const auto guard = enter();
  if (!save_ || !save_->committed) return invalid("retain: nothing was committed; commit a save first");
  if (auto same = save_->check_places(); !same) return std::unexpected(same.error());
  auto entries = list_steps(directory_);
  if (!entries) return std::unexpected(entries.error());
  std::erase_if(*entries, [](const StepEntry& entry) { return entry.commits.empty(); });
  // Without `keep` only what this save replaced goes: with thousands of steps, reading the manifest of each
  // would make every save slower than the one before.
  if (!keep) std::erase_if(*entries, [this](const StepEntry& entry) { return entry.step != save_->step; });
  const DirectoryOps ops = ops_.checked_by([this] {
    if (auto same = save_->check_places(); !same) return same;
    return save_->lock->check_with_volumes();
  });
  GarbageCollector collector(directory_, descriptor_, ops, GarbageCollector::DryRun::no);
  std::vector<Error> problems;
  struct Candidate {
    const StepEntry* entry;
    Commit commit;
    bool is_later;  // of a step after the one that was saved: the run went back behind it
  };
  std::vector<Candidate> candidates;
  for (const StepEntry& entry : *entries) {
    const auto whole = check_manifest(directory_, entry.step, entry.commits.back());
    const auto commit = newest_commit(directory_, entry);
    if (whole && commit)
      candidates.push_back({&entry, *commit, entry.step > save_->step});
    else
      problems.push_back(whole ? commit.error() : whole.error());
  }
  // Those that stay come first: a run that went back behind later steps gives them up before any other.
  std::ranges::sort(candidates, std::greater(),
                    [](const Candidate& each) { return std::pair(!each.is_later, each.commit.number); });
  std::vector<const StepEntry*> doomed;
  std::vector<Commit> strangers;  // all that are not this run's to remove, once there are more than are kept
  const std::uint64_t most = keep.value_or(std::numeric_limits<std::uint64_t>::max());
  std::uint64_t kept = 0;
  for (const auto& [entry, commit, is_later] : candidates) {
    if (commit.number < descriptor_.first_commit || !known_.knows(commit)) {
      strangers.push_back(commit);
    } else if (kept >= most && commit.number != save_->committed) {
      doomed.push_back(entry);
    } else {
      ++kept;
      if (entry->commits.size() > 1) collector.clean(*entry);
    }
  }
  if (kept + strangers.size() <= most) strangers.clear();
  if (!std::ranges::all_of(strangers, [&](const Commit& each) { return reported_.contains(each); })) {
    problems.push_back(not_removed(directory_, strangers, most));
    reported_.insert(strangers.begin(), strangers.end());
  }
  // In the reverse order, so that a crash leaves no gap: later steps, then the oldest.
  for (const StepEntry* entry : std::views::reverse(doomed)) collector.remove(*entry);
  CollectionResult result = collector.take_result();
  result.problems.insert(result.problems.end(), problems.begin(), problems.end());
  return result;
}

void Store::release() {
  const auto guard = enter();
  save_.reset();
}

Result<CollectionResult> Store::abandon() {
  const auto guard = enter();
  const std::unique_ptr<Save> save = std::move(save_);
  if (!save || save->committed) return CollectionResult{};
  if (!save->check_places()) return CollectionResult{};  // what is there may be another's
  auto commits = commits_in(directory_, save->step);
  if (!commits) return std::unexpected(commits.error());
  // Its name is there, and making that durable failed. That it can be synced now proves nothing, since an
  // error is reported once: what it replaces may be all that a power failure leaves.
  const bool attempted = std::ranges::any_of(
      *commits, [&](const std::uint64_t commit) { return std::optional(commit) == save->attempted; });
  if (attempted) return CollectionResult{};
  const DirectoryOps ops = ops_.checked_by([&save] { return save->lock->check_with_volumes(); });
  GarbageCollector collector(directory_, descriptor_, ops, GarbageCollector::DryRun::no);
  collector.clean({.step = save->step, .commits = std::move(*commits)});
  return collector.take_result();
}

Status Store::remove(std::uint64_t step) {
  const auto guard = enter();
  if (save_) return busy(directory_);
  auto commits = commits_in(directory_, step);
  if (!commits) return std::unexpected(commits.error());
  if (commits->empty()) return no_checkpoint_of(directory_, step);
  const auto locked = DirectoryLock::acquire(directory_, DirectoryLock::IfMissing::create);
  if (!locked) return std::unexpected(locked.error());
  const auto recorded = read_store_descriptor(directory_);
  if (!recorded) return std::unexpected(recorded.error());
  const StoreDescriptor descriptor = recorded->value_or(StoreDescriptor{.id = descriptor_.id, .volumes = {}});
  // Again, since it was not locked before.
  commits = commits_in(directory_, step);
  if (!commits) return std::unexpected(commits.error());
  if (commits->empty()) return no_checkpoint_of(directory_, step);
  (*locked)->hold_volumes(descriptor);
  const DirectoryOps ops = ops_.checked_by([&locked] { return (*locked)->check_with_volumes(); });
  GarbageCollector collector(directory_, descriptor, ops, GarbageCollector::DryRun::no);
  collector.remove_whatever_it_is({.step = step, .commits = std::move(*commits)});
  CollectionResult result = collector.take_result();
  if (!result.problems.empty()) return std::unexpected(std::move(result.problems.front()));
  return ops_.sync_directory(directory_);
}

Result<CollectionResult> Store::collect(GarbageCollector::DryRun dry_run, GarbageCollector::Orphans orphans) {
  return collect_garbage(dry_run == GarbageCollector::DryRun::yes ? Occasion::dry_run : Occasion::asked,
                         orphans);
}

Result<CollectionResult> Store::collect_if_used() {
  struct stat status{};
  if (::stat(fmt::format("{}/{}", directory_, kLockFile).c_str(), &status) != 0) return CollectionResult{};
  return collect_garbage(Occasion::opening, GarbageCollector::Orphans::leave);
}

Result<CollectionResult> Store::collect_garbage(Occasion occasion, GarbageCollector::Orphans orphans) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPause{100};
  constexpr std::chrono::milliseconds kLongestPart{4000};
  Clock::duration part = collection_pace_.first_part;
  Clock::time_point end;
  CollectionProgress progress{.should_pause = [&end] { return Clock::now() >= end; }};
  CollectionResult collected;
  for (bool is_first = true;; is_first = false) {
    end = Clock::now() + part;
    bool is_paused = false;
    auto result = collect_part(occasion, orphans, progress, is_paused);
    if (!result && is_first) return result;
    if (result)
      collected.add(std::move(*result));
    else
      collected.problems.push_back(std::move(result.error()));
    if (!is_paused) break;
    if (collection_pace_.pause)
      collection_pace_.pause();
    else
      std::this_thread::sleep_for(kPause);
    part = std::min<Clock::duration>(2 * part, kLongestPart);
  }
  if (occasion != Occasion::opening) {
    for (const std::string& volume : collected.missing_volumes)
      collected.problems.push_back(volume_is_missing(volume));
  }
  return collected;
}

Result<CollectionResult> Store::collect_part(Occasion occasion, GarbageCollector::Orphans orphans,
                                             CollectionProgress& progress, bool& is_paused) {
  const auto guard = enter();
  CollectionResult busy;
  busy.busy = true;
  if (save_) return busy;
  if (!check_not_foreign(directory_)) return CollectionResult{};
  auto is_begun = has_checkpoints(directory_);
  if (!is_begun) return std::unexpected(is_begun.error());
  const auto locked = DirectoryLock::acquire(directory_, occasion == Occasion::asked && *is_begun
                                                             ? DirectoryLock::IfMissing::create
                                                             : DirectoryLock::IfMissing::go_without);
  if (!locked && locked.error().code == EBUSY) return busy;
  if (!locked) return std::unexpected(locked.error());
  if (occasion == Occasion::opening && !(*locked)->excludes_every_writer()) return CollectionResult{};
  if (!*is_begun && !(*locked)->has_file()) return CollectionResult{};  // nobody has begun a save
  is_begun = has_checkpoints(directory_);                               // also where that went meanwhile
  if (!is_begun) return std::unexpected(is_begun.error());
  // As it is by now: the directories on volumes that another process has given up are not ours to search.
  const auto recorded = read_store_descriptor(directory_);
  if (!recorded) return std::unexpected(recorded.error());
  const StoreDescriptor descriptor = recorded->value_or(StoreDescriptor{.id = descriptor_.id, .volumes = {}});
  const std::vector<std::uint64_t> no_shards(descriptor.volumes.size());
  const bool dry_run = occasion == Occasion::dry_run;
  (*locked)->hold_volumes(descriptor);
  const DirectoryOps ops = ops_.checked_by([&locked] { return (*locked)->check_with_volumes(); });
  auto ours = dry_run ? check_owners(descriptor, directory_)
                      : claim_volumes(descriptor, no_shards, Unrecorded::leave, ops);
  if (!ours) return std::unexpected(ours.error());
  GarbageCollector collector(directory_, descriptor, ops,
                             dry_run ? GarbageCollector::DryRun::yes : GarbageCollector::DryRun::no, orphans);
  if (*is_begun)
    is_paused = !collector.clean_all(progress);
  else
    collector.clean_unbegun();
  return collector.take_result();
}

// Volumes that the descriptor or a manifest of the directory names.
Result<std::set<std::string>> Store::all_volumes() const {
  const auto recorded = read_store_descriptor(directory_);
  if (!recorded) return std::unexpected(recorded.error());
  const auto entries = list_steps(directory_);
  if (!entries) return std::unexpected(entries.error());
  std::set<std::string> volumes;
  if (const std::optional<StoreDescriptor>& known = *recorded) {
    volumes.insert(known->volumes.begin(), known->volumes.end());
    volumes.insert(known->former_volumes.begin(), known->former_volumes.end());
  }
  for (const StepEntry& entry : *entries) {
    const auto manifest = read_newest_manifest(directory_, entry.step);
    if (manifest) volumes.insert(manifest->volumes.begin(), manifest->volumes.end());
  }
  volumes.erase(std::string(kOwnVolume));
  return volumes;
}

Result<Store::Adopted> Store::adopt() {
  const auto guard = enter();
  if (save_) return busy(directory_);
  const auto locked = DirectoryLock::acquire(directory_, DirectoryLock::IfMissing::create);
  if (!locked) return std::unexpected(locked.error());
  const auto volumes = all_volumes();
  if (!volumes) return std::unexpected(volumes.error());
  Adopted adopted;
  for (const std::string& volume : *volumes)
    (is_directory(volume) ? adopted.volumes : adopted.missing).push_back(volume);
  // All or none, as far as can be seen.
  for (const std::string& volume : adopted.volumes) {
    if (auto can = check_can_adopt(volume, directory_); !can) return std::unexpected(can.error());
  }
  for (const std::string& volume : adopted.volumes) {
    if (auto done = adopt_volume(volume, directory_, ops_); !done) return std::unexpected(done.error());
  }
  return adopted;
}

}  // namespace trunkline::checkpoint
