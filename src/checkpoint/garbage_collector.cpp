#include "checkpoint/garbage_collector.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <ranges>
#include <set>
#include <tuple>
#include <utility>

#include "base/log.h"
#include "checkpoint/names.h"
#include "checkpoint/shard_references.h"
#include "checkpoint/volume_owner.h"
#include "os/file_type.h"
#include "os/read_text.h"
#include "os/temporary_file.h"

namespace trunkline::checkpoint {
namespace {

// Larger manifests are read only where there is something to remove.
constexpr off_t kReadBytes = 64 << 10;

bool is_debris(const std::string& name) { return is_shard_file(name) || os::is_temporary_name(name); }

}  // namespace

std::uint64_t CollectionResult::bytes() const {
  std::uint64_t total = 0;
  for (const Removed& each : removed) total += each.bytes;
  return total;
}

void CollectionResult::add(CollectionResult later) {
  is_busy = later.is_busy;
  removed.insert(removed.end(), later.removed.begin(), later.removed.end());
  for (Error& problem : later.problems) {  // several parts may examine the same volume
    if (std::ranges::find(problems, problem.message, &Error::message) == problems.end())
      problems.push_back(std::move(problem));
  }
  missing_volumes.merge(later.missing_volumes);
}

GarbageCollector::GarbageCollector(std::string directory, StoreDescriptor descriptor, DirectoryOps ops,
                                   DryRun dry_run, Orphans orphans)
    : directory_(std::move(directory)),
      descriptor_(std::move(descriptor)),
      ops_(std::move(ops)),
      dry_run_(dry_run),
      orphans_(orphans) {}

void GarbageCollector::note(Status status) {
  if (!status) result_.problems.push_back(std::move(status.error()));
}

// Where files of the step may be. In directories on other stores' volumes (the descriptor was lost, or the
// manifest is not ours) only what the manifest names may be removed.
std::vector<GarbageCollector::StepDirectory> GarbageCollector::directories_of(
    std::uint64_t step, const Manifest* manifest) const {
  std::vector<StepDirectory> directories{
      {.path = volume_step_directory(directory_, std::string(kOwnVolume), step),
       .volume = {},
       .own = true,
       .known = {}}};
  const auto directory_on = [&](const std::string& volume, bool own) -> StepDirectory& {
    const std::string path = volume_step_directory(directory_, volume, step);
    const auto found = std::ranges::find(directories, path, &StepDirectory::path);
    if (found != directories.end()) return *found;
    return directories.emplace_back(StepDirectory{.path = path, .volume = volume, .own = own, .known = {}});
  };
  for (const std::string& volume : descriptor_.all_volumes()) directory_on(volume, true);
  if (manifest == nullptr) return directories;
  for (const Shard& shard : manifest->shards) {
    const std::string& volume = manifest->volumes[shard.volume];
    directory_on(volume, descriptor_.owns(volume)).known.push_back(shard.file);
  }
  for (StepDirectory& directory : directories) std::ranges::sort(directory.known);
  return directories;
}

Status GarbageCollector::remove_file(const std::string& path, std::string_view why) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) {
    // Only a file that is known to be gone counts as removed: a manifest that stays must not lose its shards.
    if (errno == ENOENT || errno == ENOTDIR) return {};
    return std::unexpected(system_error(errno, "remove " + path, path));
  }
  if (dry_run_ == DryRun::no) {
    if (auto removed = ops_.remove_file(path); !removed) return removed;
    log::info(log::Component::checkpoint, "removed {} ({} bytes): {}", path, status.st_size, why);
  }
  result_.removed.push_back({.path = path, .bytes = static_cast<std::uint64_t>(status.st_size)});
  return {};
}

// Returns whether the file is gone. A temporary file that is still being written stays: tl.save() may write
// into any directory, without this directory's lock.
Result<bool> GarbageCollector::remove_debris(const std::string& directory, const std::string& name) {
  const std::string path = fmt::format("{}/{}", directory, name);
  std::unique_ptr<os::DeadWriter> dead;  // held until the file is removed
  if (os::is_temporary_name(name)) {
    dead = os::DeadWriter::find(path);
    if (!dead) return false;
  }
  const char* why = dead ? "its writer died" : "no checkpoint refers to it";
  if (auto removed = remove_file(path, why); !removed) return std::unexpected(removed.error());
  return true;
}

// Finds the shards on a volume that stay, whatever happens to the step.
Status GarbageCollector::find_kept_on_volume(StepDirectory& directory) {
  const auto names = names_in(directory.path);
  if (!names) return std::unexpected(names.error());
  if (std::ranges::none_of(*names, is_shard_file)) return {};
  if (!named_below_) named_below_ = shards_named_below(directory_);
  if (!*named_below_) return std::unexpected(named_below_->error());
  directory.kept.insert((*named_below_)->begin(), (*named_below_)->end());
  if (orphans_ == Orphans::remove) return {};
  auto moved = moved_shards(directory.path);
  if (!moved) return std::unexpected(moved.error());
  directory.kept.merge(*moved);
  return {};
}

// Shards of the kept manifest stay on every volume: disks may be mounted in each other's place.
Status GarbageCollector::find_kept(std::vector<StepDirectory>& directories, const Manifest* kept) {
  for (StepDirectory& directory : directories) {
    if (directory.volume.empty()) {
      auto beside = shards_named_beside(directory.path);
      if (!beside) return std::unexpected(beside.error());
      directory.kept = std::move(*beside);
    } else if (auto found = find_kept_on_volume(directory); !found) {
      return found;
    }
    if (kept == nullptr) continue;
    for (const Shard& shard : kept->shards) directory.kept.insert(shard.file);
  }
  return {};
}

Status GarbageCollector::clean_directory(const StepDirectory& directory, bool step_stays,
                                         bool keep_directory) {
  const auto names = names_in(directory.path);
  if (!names) return std::unexpected(names.error());
  std::size_t left = names->size();
  bool lists_moved = false;
  for (const std::string& name : *names) {
    lists_moved |= !directory.volume.empty() && name == kMovedShardsFile;
    const bool known = std::ranges::binary_search(directory.known, name);
    const bool ours = is_debris(name) && (known || directory.own);
    // The manifest was removed before; in a dry run it still exists.
    const bool manifest_gone = dry_run_ == DryRun::yes && !step_stays && commit_of(name).has_value();
    if (manifest_gone) --left;
    if (!ours || directory.kept.contains(name)) continue;
    const auto removed = remove_debris(directory.path, name);
    if (!removed) return std::unexpected(removed.error());
    if (*removed) --left;
  }
  if (lists_moved && left == 1) {  // and none of them is left
    if (auto removed = remove_file(fmt::format("{}/{}", directory.path, kMovedShardsFile),
                                   "no shard that it names is left");
        !removed)
      return removed;
    --left;
  }
  if (left > 0 || keep_directory || !os::exists(directory.path)) return {};
  if (os::is_symlink(directory.path))
    return remove_file(directory.path, "the directory behind the link is empty");
  if (dry_run_ == DryRun::no) {
    if (auto removed = ops_.remove_directory(directory.path); !removed) return removed;
  }
  result_.removed.push_back({.path = directory.path});
  return {};
}

Status GarbageCollector::check_owners(const std::vector<StepDirectory>& directories) {
  for (const StepDirectory& directory : directories) {
    if (directory.volume.empty()) continue;
    auto known = owners_.find(directory.volume);
    if (known == owners_.end())
      known = owners_.emplace(directory.volume, check_recorded_owner(directory.volume, directory_)).first;
    if (!known->second) return known->second;
  }
  return {};
}

// A checkpoint exists exactly as long as its manifest does, so it is removed in this order, which is safe
// against a crash at any point:
// 0. Read the owners of the volumes, and everything that names shards there, while every manifest still
//    exists. If any of that cannot be read, nothing is removed.
// 1. Make the name of the kept manifest durable (its writer may have died before it did).
// 2. Remove other manifests, the oldest first: after a crash in between, none that was replaced counts again.
// 3. Make each of these removals durable before the next: no manifest may outlive its shards.
// 4. Remove shards that the kept manifest does not name, and temporary files.
// 5. Remove directories that are empty now, the one in DIR last and once the others are durable: without it,
//    what is left on volumes would count as moved by hand.
// A crash after 3 leaves debris, which the next collection finds.
Status GarbageCollector::collect(const StepEntry& entry, const Manifest* kept, const Manifest* doomed) {
  std::vector<StepDirectory> directories = directories_of(entry.step, kept != nullptr ? kept : doomed);
  if (auto owners = check_owners(directories); !owners) return owners;
  if (auto found = find_kept(directories, kept); !found) return found;
  if (kept != nullptr && entry.commits.size() > 1 && dry_run_ == DryRun::no) {
    if (auto synced = ops_.sync_directory(directories.front().path); !synced) return synced;
  }
  for (const std::uint64_t commit : entry.commits) {
    if (kept != nullptr && commit == kept->commit) continue;
    const char* why = kept != nullptr ? "a later save of the step replaces it" : "the checkpoint is removed";
    if (auto removed = remove_file(manifest_path(directory_, entry.step, commit), why); !removed)
      return removed;
    if (dry_run_ == DryRun::yes) continue;
    if (auto synced = ops_.sync_directory(directories.front().path); !synced) return synced;
  }
  if (auto collected = clean_volumes(directories, kept != nullptr); !collected) return collected;
  const auto missing = missing_volumes(directories, kept != nullptr || doomed != nullptr);
  // A step that is only cleaned, and stays, does not depend on missing volumes.
  if (kept == nullptr) result_.missing_volumes.insert(missing.begin(), missing.end());
  return clean_directory(directories.front(), kept != nullptr, !missing.empty());
}

Status GarbageCollector::clean_volumes(const std::vector<StepDirectory>& directories, bool step_stays) {
  for (std::size_t i = directories.size(); i-- > 1;) {
    const std::size_t before = result_.removed.size();
    if (auto collected = clean_directory(directories[i], step_stays); !collected) return collected;
    if (step_stays || dry_run_ == DryRun::yes || result_.removed.size() == before) continue;
    const std::string& changed =
        os::exists(directories[i].path) ? directories[i].path : directories[i].volume;
    if (auto synced = ops_.sync_directory(changed); !synced) return synced;
  }
  return {};
}

// Volumes that are not mounted and may have shards of the step: those in use, whose shards an earlier commit
// may have named; those that its manifest names; and, where no manifest is left, former ones as well.
std::vector<std::string> GarbageCollector::missing_volumes(const std::vector<StepDirectory>& directories,
                                                           bool names_are_known) const {
  std::vector<std::string> missing;
  for (const StepDirectory& directory : directories) {
    const bool may_be_used =
        !names_are_known || !directory.known.empty() ||
        std::ranges::find(descriptor_.volumes, directory.volume) != descriptor_.volumes.end();
    if (!directory.volume.empty() && may_be_used && !os::exists(directory.volume))
      missing.push_back(directory.volume);
  }
  return missing;
}

// Removes what volumes have of a step without a directory. If the step has a directory by now, that is not
// touched.
Status GarbageCollector::remove_left_behind(std::uint64_t step) {
  std::vector<StepDirectory> directories = directories_of(step, nullptr);
  if (auto owners = check_owners(directories); !owners) return owners;
  if (auto found = find_kept(directories, nullptr); !found) return found;
  return clean_volumes(directories, false);
}

bool GarbageCollector::is_link(const StepEntry& entry) const {
  return os::is_symlink(volume_step_directory(directory_, std::string(kOwnVolume), entry.step));
}

Status GarbageCollector::remove_link(const StepEntry& entry) {
  auto removed = remove_file(volume_step_directory(directory_, std::string(kOwnVolume), entry.step),
                             "the checkpoint is removed, which is a link to a directory elsewhere");
  if (!removed || dry_run_ == DryRun::yes) return removed;
  return ops_.sync_directory(directory_);
}

void GarbageCollector::remove(const StepEntry& entry) {
  if (is_link(entry)) return note(remove_link(entry));
  std::optional<Manifest> manifest;
  if (!entry.commits.empty()) {
    auto read = read_manifest_of(directory_, entry.step, entry.commits.back());
    if (!read) return note(std::unexpected(std::move(read.error())));
    manifest = std::move(*read);
  }
  note(collect(entry, nullptr, manifest ? &*manifest : nullptr));
}

void GarbageCollector::remove_whatever_it_is(const StepEntry& entry) {
  if (is_link(entry)) return note(remove_link(entry));
  const auto manifest = read_manifest_of(directory_, entry.step, entry.commits.back());
  note(collect(entry, nullptr, manifest ? &*manifest : nullptr));
}

// Whether the files of a step are one manifest and all shards of one save. Then they either belong together,
// or the manifest lost its own shards, and the others are left for a later collection that finds more files.
bool GarbageCollector::is_one_save(const StepEntry& entry) const {
  if (entry.commits.size() != 1) return false;
  std::string nonce;
  std::uint64_t count = 0;
  std::set<std::uint64_t> indices;
  for (const StepDirectory& directory : directories_of(entry.step, nullptr)) {
    const auto names = names_in(directory.path);
    if (!names) return false;
    if (!directory.volume.empty() && names->empty() && os::exists(directory.path))
      return false;  // to be removed
    for (const std::string& name : *names) {
      if (os::is_temporary_name(name)) return false;
      const auto shard = shard_of(name);
      if (!shard) continue;
      if (indices.empty()) {
        nonce = shard->nonce;
        count = shard->count;
      }
      const bool same = shard->nonce == nonce && shard->count == count;
      if (!same || shard->index >= count || !indices.insert(shard->index).second) return false;
    }
  }
  return indices.size() == count;
}

void GarbageCollector::clean(const StepEntry& entry) {
  if (is_link(entry)) return;
  if (entry.commits.empty()) return remove(entry);
  const std::string path = manifest_path(directory_, entry.step, entry.commits.back());
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0 && status.st_size > kReadBytes && is_one_save(entry)) {
    const auto beginning = os::read_text(path, kMaxLineBytes);
    if (!beginning) return note(std::unexpected(beginning.error()));
    return note(check_first_line(*beginning, static_cast<std::uint64_t>(status.st_size), path));
  }
  const auto manifest = read_manifest_of(directory_, entry.step, entry.commits.back());
  if (!manifest) return note(std::unexpected(manifest.error()));
  note(collect(entry, &*manifest, nullptr));
}

Status GarbageCollector::remove_temporary_files(const std::string& directory) {
  const auto names = names_in(directory);
  if (!names) return std::unexpected(names.error());
  for (const std::string& name : *names) {
    if (!os::is_temporary_name(name)) continue;
    if (const auto removed = remove_debris(directory, name); !removed)
      return std::unexpected(removed.error());
  }
  return {};
}

// Fails where a step without a directory of its own has shards on volumes that nothing names. A user who
// moves the step back at this very moment gets this error too: checking for its directory again would mistake
// the shards for those of a step that is being removed.
Status GarbageCollector::check_orphans(std::uint64_t step) {
  const std::vector<StepDirectory> directories = directories_of(step, nullptr);
  for (std::size_t i = 1; i < directories.size(); ++i) {
    auto names = names_in(directories[i].path);
    if (!names) return std::unexpected(names.error());
    std::erase_if(*names, [](const std::string& name) { return !is_shard_file(name); });
    if (names->empty()) continue;
    if (!named_below_) named_below_ = shards_named_below(directory_);
    if (!*named_below_) return std::unexpected(named_below_->error());
    std::erase_if(*names, [&](const std::string& name) { return (*named_below_)->contains(name); });
    if (names->empty()) continue;
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format("{} holds shards that no checkpoint in {} refers to, and {} is missing: it was moved or "
                    "removed by hand. Move it back, or, if nothing else needs the shards, remove them with: "
                    "trunkline checkpoint gc --orphaned {}",
                    directories[i].path, directory_, directories.front().path, directory_),
        directories[i].path));
  }
  return {};
}

// Returns false if it paused, like clean_all().
bool GarbageCollector::clean_volume(const std::string& volume, CollectionProgress& progress) {
  if (auto owner = check_owners({{.path = {}, .volume = volume, .own = true, .known = {}}}); !owner) {
    note(std::move(owner));
    return true;
  }
  if (progress.searched.insert(volume).second) note(remove_temporary_files(volume));
  const auto steps = step_directories_in(volume);
  if (!steps) {
    note(std::unexpected(steps.error()));
    return true;
  }
  for (const std::uint64_t step : *steps) {
    if (!progress.done.insert(step).second) continue;
    // Moved or copied into the directory since its steps were listed: its manifests have not been examined.
    if (os::exists(volume_step_directory(directory_, std::string(kOwnVolume), step))) continue;
    auto none = orphans_ == Orphans::leave ? check_orphans(step) : Status{};
    note(none ? remove_left_behind(step) : std::move(none));
    if (progress.should_pause()) return false;
  }
  return true;
}

void GarbageCollector::clean_all() {
  CollectionProgress progress{.should_pause = [] { return false; }};
  std::ignore = clean_all(progress);
}

bool GarbageCollector::clean_all(CollectionProgress& progress) {
  const auto entries = list_steps(directory_);
  if (!entries) {
    note(std::unexpected(entries.error()));
    return true;
  }
  if (!progress.listed) {
    const auto steps = *entries | std::views::transform(&StepEntry::step);
    progress.listed.emplace(steps.begin(), steps.end());
  }
  for (const StepEntry& entry : *entries) {
    if (!progress.listed->contains(entry.step) || !progress.done.insert(entry.step).second) continue;
    clean(entry);
    if (progress.should_pause()) return false;
  }
  if (progress.searched.insert(directory_).second) note(remove_temporary_files(directory_));
  for (const std::string& volume : descriptor_.all_volumes()) {
    if (!clean_volume(volume, progress)) return false;
  }
  return true;
}

void GarbageCollector::clean_unbegun() { note(remove_temporary_files(directory_)); }

}  // namespace trunkline::checkpoint
