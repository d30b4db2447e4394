#include "checkpoint/save_transaction.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/invalid_argument.h"
#include "base/log.h"
#include "base/trace.h"
#include "base/utc_time.h"
#include "checkpoint/listing.h"
#include "checkpoint/names.h"
#include "checkpoint/retention.h"
#include "os/unique_fd.h"

namespace trunkline::checkpoint {
namespace {

constexpr trace::Kind kCommit{"commit", trace::Category::checkpoint};
constexpr trace::Kind kRetain{"retain", trace::Category::checkpoint};

// The entry of one step; empty: it has no checkpoint.
Result<std::vector<StepEntry>> list_step(const std::string& directory, std::uint64_t step) {
  auto commits = commits_in(directory, step);
  if (!commits) return std::unexpected(commits.error());
  return std::vector<StepEntry>{{.step = step, .commits = *std::move(commits)}};
}

std::unexpected<Error> has_ended(std::string_view call, std::uint64_t step) {
  return invalid_argument(fmt::format(
      "{}: the save of step {} has ended, or belongs to the process that this one was forked from; begin "
      "another save",
      call, step));
}

}  // namespace

SaveTransaction::SaveTransaction(std::shared_ptr<StoreState> state, std::unique_ptr<DirectoryLock> lock,
                                 HeldDirectories directories, std::uint64_t step, Placement placement)
    : state_(std::move(state)),
      step_(step),
      placement_(std::move(placement)),
      lock_(std::move(lock)),
      directories_(std::move(directories)) {
  state_->save = this;
}

// One that has ended does not wait for who uses the state now.
SaveTransaction::~SaveTransaction() {
  if (lock_) release();
}

std::unique_lock<std::mutex> SaveTransaction::enter() {
  auto guard = state_->enter();
  if (state_->save != this) end();  // in a forked child
  return guard;
}

void SaveTransaction::end() {
  phase_ = Phase::ended;
  directories_ = {};
  lock_.reset();
  if (state_->save == this) state_->save = nullptr;
}

// Whether the lock is still this save's, and all paths lead to where the shards were written. Volumes that it
// does not write to may come and go.
Status SaveTransaction::check_places() {
  if (auto same = lock_->check_or_renew(); !same) return same;
  return directories_.check();
}

Result<ShardLinks> SaveTransaction::link_shards(const Manifest& base, std::span<const std::uint64_t> wanted) {
  const auto guard = enter();
  if (phase_ == Phase::ended) return has_ended("link_shards", step_);
  if (phase_ != Phase::writing || !links_.empty())
    return invalid_argument("link_shards: must be called once, before commit");
  if (auto same = check_places(); !same) return std::unexpected(same.error());
  const DirectoryOps ops = lock_->guarded(state_->ops);
  ShardLinks made = checkpoint::link_shards(state_->directory, step_, placement_, base, wanted, ops);
  for (const auto& link : made.links) {
    if (link) links_.push_back(link->path);
  }
  return made;
}

// Before the manifest is there, so that it never has debris beside it.
Status SaveTransaction::remove_unused_links(const Manifest& manifest) {
  std::set<std::string> used;
  for (std::size_t i = 0; i < manifest.shards.size(); ++i)
    used.insert(shard_path(state_->directory, manifest, i));
  const DirectoryOps ops = lock_->guarded(state_->ops);
  for (const std::string& link : links_) {
    if (used.contains(link)) continue;
    if (auto removed = ops.remove_file(link); !removed) return removed;
  }
  return {};
}

Status SaveTransaction::check_shards(const Manifest& manifest) const {
  for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
    const std::string path = shard_path(state_->directory, manifest, i);
    struct stat status{};
    if (::stat(path.c_str(), &status) != 0)
      return std::unexpected(
          system_error(errno, "commit the checkpoint: cannot stat its shard " + path, path));
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

Status SaveTransaction::sync_directories(const Manifest& manifest) const {
  std::set<std::string> directories{
      volume_step_directory(state_->directory, std::string(kOwnVolume), manifest.step)};
  for (const Shard& shard : manifest.shards) {
    directories.insert(
        volume_step_directory(state_->directory, manifest.volumes[shard.volume], manifest.step));
  }
  for (const std::string& each : directories) {
    if (auto synced = state_->ops.sync_directory(each); !synced) return synced;
  }
  return {};
}

// Steps 5 to 7 of commit().
Status SaveTransaction::write_manifest(const Commit& commit, const std::string& text) {
  // Known before it is there: where making it durable fails, it may have its name, and the next save replaces
  // it.
  state_->known.saved.insert(commit);
  const std::string path = manifest_path(state_->directory, commit.step, commit.number);
  const std::string& like = manifest_like_.empty() ? placement_.replaced_manifest : manifest_like_;
  auto written = state_->ops.create_file_durably(path, text, like);
  if (written) return {};
  if (written.error().code == EEXIST) {  // another process has made it
    state_->known.saved.erase(commit);
  } else {
    phase_ = Phase::uncertain;
    number_ = commit.number;
  }
  return written;
}

// The end of step 7: what was moved, or unlocked, before the manifest had its name may not be whole.
// `replaces`: the step had a checkpoint before.
Status SaveTransaction::confirm(const Commit& commit, bool replaces) {
  auto same = check_places();
  number_ = commit.number;
  phase_ = same ? Phase::committed : Phase::uncertain;
  if (same) return same;
  // Others that took the lock may have removed an earlier checkpoint of the step on account of this one.
  if (lock_->check_or_renew() || !replaces) withdraw_manifest(commit);
  return same;
}

// Where it was written, durably: its path, and with it DirectoryOps, may lead to another directory by now. If
// that fails it stays, unknown to this store, whose retention must not rely on it.
void SaveTransaction::withdraw_manifest(const Commit& commit) {
  state_->known.saved.erase(commit);
  if (::unlinkat(directories_.first(), manifest_file(commit.number).c_str(), 0) != 0) return;
  const os::UniqueFd opened(::openat(directories_.first(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.valid()) std::ignore = ::fsync(opened.get());
}

// How a checkpoint comes to be, so that it is there, whole, exactly when its manifest is, whenever a process
// is killed or the power fails:
// 1. Every shard is written under a name that no manifest knows: the directory of its step is made and
//    durable by then (Store::begin()), and the name has a nonce of this save. A checkpoint of the same step
//    that is there already is not touched. Until a manifest names it, a shard is debris to the holder of the
//    lock. A shard may be a hard link to one of an earlier checkpoint, whose bytes are durable:
//    link_shards().
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
Result<std::uint64_t> SaveTransaction::commit(Manifest manifest, std::uint64_t first_number) {
  const auto guard = enter();
  return commit_as(std::move(manifest), std::nullopt, first_number);
}

// With `number` the commit has just that.
Result<std::uint64_t> SaveTransaction::commit_as(Manifest manifest, std::optional<std::uint64_t> number,
                                                 std::uint64_t first_number) {
  const trace::Span span(kCommit, state_->directory);
  if (phase_ == Phase::ended) return has_ended("commit", step_);
  if (phase_ == Phase::committed)
    return invalid_argument(fmt::format("commit: step {} was committed before", step_));
  if (manifest.step != step_)
    return invalid_argument(
        fmt::format("manifest: it is of step {}, and the save of {}", manifest.step, step_));
  if (auto same = check_places(); !same) return std::unexpected(same.error());
  const auto entries = state_->list(*lock_);
  if (!entries) return std::unexpected(entries.error());
  // Above those of steps that somebody has moved out meanwhile, and may move back.
  const std::uint64_t first =
      std::max({state_->descriptor.first_commit, state_->known.newest_number() + 1, first_number});
  manifest.commit = number.value_or(next_commit(state_->directory, *entries, first));
  manifest.time = utc_time(std::time(nullptr));
  const auto text = format_manifest(manifest);
  if (!text) return std::unexpected(text.error());
  if (auto whole = check_shards(manifest); !whole) return std::unexpected(whole.error());
  if (auto removed = remove_unused_links(manifest); !removed) return std::unexpected(removed.error());
  if (auto synced = sync_directories(manifest); !synced) return std::unexpected(synced.error());
  // All that took its time.
  if (auto same = check_places(); !same) return std::unexpected(same.error());
  const Commit commit{.step = step_, .number = manifest.commit, .first_line = std::string(first_line(*text))};
  if (auto written = write_manifest(commit, *text); !written) return std::unexpected(written.error());
  const bool replaces = std::ranges::any_of(
      *entries, [&](const StepEntry& entry) { return entry.step == step_ && !entry.commits.empty(); });
  if (auto confirmed = confirm(commit, replaces); !confirmed) return std::unexpected(confirmed.error());
  state_->aside.reset();
  log::info(log::Component::checkpoint, "{}: step {} is saved (commit {}; tensors: {}, shards: {})",
            state_->directory, step_, commit.number, manifest.tensors.size(), manifest.shards.size());
  return commit.number;
}

Result<std::uint64_t> SaveTransaction::commit_copy(const Manifest& original) {
  const auto guard = enter();
  if (original.shards.size() != placement_.shards.size()) {
    return invalid_argument(fmt::format("manifest: it has {} shards, and the save {}", original.shards.size(),
                                        placement_.shards.size()));
  }
  const auto entries = state_->list(*lock_);
  if (!entries) return std::unexpected(entries.error());
  if (next_commit(state_->directory, *entries, original.commit) != original.commit) {
    return std::unexpected(Error{
        .kind = ErrorKind::system,
        .code = EEXIST,
        .message = fmt::format("cannot copy step {} to {}: another run has saved there meanwhile (commit {} "
                               "of the copy is taken); give each run a directory of its own",
                               step_, state_->directory, original.commit),
        .path = state_->directory});
  }
  Manifest copy = original;
  copy.volumes = placement_.volumes;
  for (std::size_t i = 0; i < copy.shards.size(); ++i) {
    copy.shards[i] = {.volume = placement_.shards[i].volume,
                      .file = placement_.shards[i].file,
                      .bytes = original.shards[i].bytes,
                      .crc32c = original.shards[i].crc32c};
  }
  // The shards are no more readable than the originals, and the manifest has values of the state, too.
  if (!placement_.paths.empty()) manifest_like_ = placement_.paths.front();
  // Not above what this process remembers: the copies may have been removed, and are made again.
  return commit_as(std::move(copy), original.commit, original.commit);
}

Result<CollectionResult> SaveTransaction::retain(std::optional<std::uint64_t> keep, const AlsoKeep& also) {
  if (keep == 0U) return invalid_argument("keep: must be at least 1, or nothing to keep all");
  if (also.every == 0U) return invalid_argument("every: must be at least 1");
  if (also.best && also.best->count == 0) return invalid_argument("best: must keep at least 1");
  const auto guard = enter();
  const trace::Span span(kRetain, state_->directory);
  if (phase_ == Phase::ended) return has_ended("retain", step_);
  if (phase_ != Phase::committed)
    return invalid_argument("retain: nothing was committed; commit the save first");
  if (auto same = check_places(); !same) return std::unexpected(same.error());
  const DirectoryOps ops = lock_->guarded(state_->ops).checked_by([this] { return check_places(); });
  // Without `keep` only what this save replaced goes: with thousands of steps, reading the manifest of each
  // would make every save slower than the one before.
  auto entries = keep ? state_->list(*lock_) : list_step(state_->directory, step_);
  if (!entries) return std::unexpected(entries.error());
  const Retention retention{.directory = state_->directory,
                            .descriptor = state_->descriptor,
                            .step = step_,
                            .commit = number_,
                            .keep = keep,
                            .also = also};
  return remove_superseded(retention, *std::move(entries), state_->known, state_->retention, ops);
}

void SaveTransaction::release() {
  const auto guard = enter();
  end();
}

Result<CollectionResult> SaveTransaction::abandon() {
  const auto guard = enter();
  const bool has_debris = phase_ == Phase::writing || phase_ == Phase::uncertain;
  auto result = has_debris ? remove_uncommitted() : CollectionResult{};
  end();
  return result;
}

Result<CollectionResult> SaveTransaction::remove_uncommitted() {
  if (!check_places()) return CollectionResult{};  // what is there may be another's
  auto commits = commits_in(state_->directory, step_);
  if (!commits) return std::unexpected(commits.error());
  // Its name is there, and making that durable failed. That it can be synced now proves nothing, since an
  // error is reported once: what it replaces may be all that a power failure leaves.
  if (phase_ == Phase::uncertain && std::ranges::find(*commits, number_) != commits->end())
    return CollectionResult{};
  // Without check_places(): the directories of the step, which that checks, may be removed here.
  const DirectoryOps ops = lock_->guarded(state_->ops);
  GarbageCollector collector(state_->directory, state_->descriptor, ops, GarbageCollector::DryRun::no);
  collector.clean({.step = step_, .commits = std::move(*commits)});
  return collector.take_result();
}

}  // namespace trunkline::checkpoint
