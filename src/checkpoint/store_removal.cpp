// What a Store removes outside of a save.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/descriptor_io.h"
#include "checkpoint/directory_lock.h"
#include "checkpoint/names.h"
#include "checkpoint/own_directory.h"
#include "checkpoint/store.h"
#include "checkpoint/volume_claims.h"
#include "checkpoint/volume_owner.h"

namespace trunkline::checkpoint {
namespace {

Error volume_is_missing(const std::string& volume) {
  return Error{
      .kind = ErrorKind::system,
      .code = ENOENT,
      .message = fmt::format("{} is missing: ENOENT; shards of steps that were removed may lie on it. "
                             "Mount its volume and run gc again. If that disk is lost, remove the "
                             "directories of steps without a manifest",
                             volume),
      .path = volume};
}

}  // namespace

Status Store::remove(std::uint64_t step) {
  const auto guard = state_->enter();
  if (state_->save != nullptr) return busy_directory(directory());
  auto commits = commits_in(directory(), step);
  if (!commits) return std::unexpected(commits.error());
  if (commits->empty()) return no_checkpoint_of(directory(), step);
  const auto locked = DirectoryLock::acquire(directory(), DirectoryLock::LockFile::create);
  if (!locked) return std::unexpected(locked.error());
  const auto recorded = read_store_descriptor(directory());
  if (!recorded) return std::unexpected(recorded.error());
  const StoreDescriptor descriptor =
      recorded->value_or(StoreDescriptor{.id = state_->descriptor.id, .volumes = {}});
  // Again, since it was not locked before.
  commits = commits_in(directory(), step);
  if (!commits) return std::unexpected(commits.error());
  if (commits->empty()) return no_checkpoint_of(directory(), step);
  (*locked)->hold_volumes(descriptor);
  const DirectoryOps ops = (*locked)->guarded(state_->ops);
  GarbageCollector collector(directory(), descriptor, ops, GarbageCollector::DryRun::no);
  collector.remove_whatever_it_is({.step = step, .commits = std::move(*commits)});
  CollectionResult result = collector.take_result();
  if (!result.problems.empty()) return std::unexpected(std::move(result.problems.front()));
  return state_->ops.sync_directory(directory());
}

Result<CollectionResult> Store::collect(GarbageCollector::DryRun dry_run, GarbageCollector::Orphans orphans) {
  return collect_garbage(dry_run == GarbageCollector::DryRun::yes ? Occasion::dry_run : Occasion::asked,
                         orphans);
}

Result<CollectionResult> Store::collect_if_used() {
  struct stat status{};
  if (::stat(fmt::format("{}/{}", directory(), kLockFile).c_str(), &status) != 0) return CollectionResult{};
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
  const auto guard = state_->enter();
  CollectionResult skipped;
  skipped.is_busy = true;
  if (state_->save != nullptr) return skipped;
  if (!check_not_foreign(directory())) return CollectionResult{};
  auto is_begun = has_checkpoints(directory());
  if (!is_begun) return std::unexpected(is_begun.error());
  const auto locked = DirectoryLock::acquire(directory(), occasion == Occasion::asked && *is_begun
                                                              ? DirectoryLock::LockFile::create
                                                              : DirectoryLock::LockFile::use_existing);
  if (!locked && locked.error().code == EBUSY) return skipped;
  if (!locked) return std::unexpected(locked.error());
  if (occasion == Occasion::opening && !(*locked)->excludes_every_writer()) return CollectionResult{};
  if (!*is_begun && !(*locked)->has_file()) return CollectionResult{};  // nobody has begun a save
  is_begun = has_checkpoints(directory());                              // also where that went meanwhile
  if (!is_begun) return std::unexpected(is_begun.error());
  // As it is by now: the directories on volumes that another process has given up are not ours to search.
  const auto recorded = read_store_descriptor(directory());
  if (!recorded) return std::unexpected(recorded.error());
  const StoreDescriptor descriptor =
      recorded->value_or(StoreDescriptor{.id = state_->descriptor.id, .volumes = {}});
  const std::vector<std::uint64_t> no_shards(descriptor.volumes.size());
  const bool dry_run = occasion == Occasion::dry_run;
  (*locked)->hold_volumes(descriptor);
  const DirectoryOps ops = (*locked)->guarded(state_->ops);
  auto ours = dry_run ? check_owners(descriptor, directory())
                      : claim_volumes(descriptor, directory(), no_shards, Unrecorded::leave, ops);
  if (!ours) return std::unexpected(ours.error());
  GarbageCollector collector(directory(), descriptor, ops,
                             dry_run ? GarbageCollector::DryRun::yes : GarbageCollector::DryRun::no, orphans);
  if (*is_begun)
    is_paused = !collector.clean_all(progress);
  else
    collector.clean_unbegun();
  return collector.take_result();
}

}  // namespace trunkline::checkpoint
