#include "checkpoint/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <numeric>
#include <ranges>
#include <set>
#include <thread>
#include <utility>

#include "checkpoint/home.h"
#include "checkpoint/names.h"
#include "checkpoint/open_store.h"
#include "checkpoint/own_directory.h"
#include "os/file_lock.h"
#include "os/fork_generation.h"
#include "os/fork_private_fd.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMaxShards = 1 << 20;
constexpr unsigned kIdDigits = 16;
// Added to a fork generation while a child's first call makes the store its own.
constexpr unsigned kBeingTaken = 1U << 31;

std::unexpected<Error> invalid(std::string message) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, std::move(message)));
}

Result<std::string> absolute_path(const std::string& path, std::string_view argument) {
  if (path.empty() || path.find('\0') != std::string::npos)
    return invalid(fmt::format("{}: \"{}\" is no path", argument, path));
  std::error_code error;
  fs::path whole = fs::absolute(path, error).lexically_normal();
  if (error) return std::unexpected(system_error(error.value(), "finding the path of " + path, path));
  if (!whole.has_filename() && whole.has_relative_path()) whole = whole.parent_path();  // "a/b/"
  return whole.string();
}

Result<std::vector<std::string>> absolute_volumes(const std::vector<std::string>& paths) {
  std::vector<std::string> volumes;
  for (const std::string& path : paths) {
    auto volume = absolute_path(path, "volumes");
    if (!volume) return std::unexpected(volume.error());
    if (std::ranges::find(volumes, *volume) != volumes.end())
      return invalid(fmt::format("volumes: {} stands there twice", *volume));
    volumes.push_back(std::move(*volume));
  }
  return volumes;
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

std::unexpected<Error> no_store(const std::string& directory, bool exists) {
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = ENOENT,
            .message = fmt::format("{} is no directory of checkpoints: {}; name the directory that a "
                                   "Checkpointer was given",
                                   directory,
                                   exists ? fmt::format("it has neither {} nor steps in it", kDescriptorFile)
                                          : "it does not exist"),
            .path = directory});
}

std::unexpected<Error> busy(const std::string& directory) {
  return std::unexpected(Error{
      .kind = ErrorKind::system,
      .code = EBUSY,
      .message =
          fmt::format("{}: another process, or another store of this one, is saving into the directory: "
                      "EBUSY; wait for it, or see who holds its file {} with lsof",
                      directory, kLockFile),
      .path = directory});
}

std::unexpected<Error> other_volumes(const std::string& directory) {
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = EAGAIN,
            .message = fmt::format(
                "{}: another process has given the directory other volumes; begin the save again", directory),
            .path = directory});
}

Status check_homes(const StoreDescriptor& descriptor, const std::string& directory) {
  for (const auto* volumes : {&descriptor.volumes, &descriptor.former_volumes}) {
    for (const std::string& volume : *volumes) {
      if (auto ours = check_home(volume, directory); !ours) return ours;
    }
  }
  return {};
}

}  // namespace

struct Store::Lock {
  Lock(const std::string& path, int flags)
      : fd(path, flags, kMode), held(fd.get(), kKind, os::FileLock::Wait::never) {}

  static constexpr mode_t kMode = 0666;  // less the umask
  static constexpr auto kKind = os::FileLock::Kind::exclusive;
  os::ForkPrivateFd fd;
  os::FileLock held;
};

struct Store::Save {
  std::unique_ptr<Lock> lock;
  std::uint64_t step = 0;
  std::optional<std::uint64_t> committed = {};
};

Store::Store(std::string directory, Volumes volumes, Changes changes)
    : directory_(std::move(directory)),
      volumes_(std::move(volumes)),
      changes_(std::move(changes)),
      generation_(os::fork_generation()) {}

Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::open(const std::string& directory, const StoreOptions& options) {
  auto path = absolute_path(directory, "directory");
  if (!path) return std::unexpected(path.error());
  Volumes volumes;
  if (options.volumes) {
    auto absolute = absolute_volumes(*options.volumes);
    if (!absolute) return std::unexpected(absolute.error());
    volumes = std::move(*absolute);
  }
  const auto device = device_of_directory(*path);
  if (!device) return std::unexpected(device.error());
  const auto recorded = read_store_descriptor(*path);
  if (!recorded) return std::unexpected(recorded.error());
  if (options.if_missing == IfMissing::create) {
    if (auto ours = check_not_foreign(*path); !ours) return std::unexpected(ours.error());
  } else if (!*recorded) {
    const auto steps = step_directories_in(*path);
    if (!steps) return std::unexpected(steps.error());
    if (steps->empty()) return no_store(*path, device->has_value());
  }
  std::unique_ptr<Store> store(new Store(std::move(*path), std::move(volumes), Changes(options.watch)));
  store->device_ = *device;
  store->recorded_ = recorded->has_value();
  store->descriptor_ = store->next_descriptor(*recorded);
  if (*recorded && store->descriptor_ != **recorded) {
    if (options.if_missing == IfMissing::fail)
      return invalid(fmt::format("volumes: {} has its shards on others", store->directory_));
    if (auto ours = check_homes(store->descriptor_, store->directory_); !ours)
      return std::unexpected(ours.error());
  }
  return store;
}

StoreDescriptor Store::descriptor() {
  const auto guard = enter();
  return descriptor_;
}

// What the descriptor is to be. A directory whose descriptor has gone since this store saw it gets a new id:
// it may have been moved away, with the shards that its manifests name on the volumes, and those of the old
// id must never count as debris here.
StoreDescriptor Store::next_descriptor(const std::optional<StoreDescriptor>& recorded) const {
  if (recorded) return volumes_ ? with_volumes(*recorded, *volumes_, directory_) : *recorded;
  if (!recorded_ && !descriptor_.id.empty()) return descriptor_;
  const StoreDescriptor none{.id = random_hex(kIdDigits), .volumes = {}};
  return with_volumes(none, volumes_ ? *volumes_ : parents_of(descriptor_.volumes), directory_);
}

std::unique_lock<std::mutex> Store::enter() {
  const unsigned now = os::fork_generation();
  for (unsigned known = generation_.load(); known != now;) {
    if (known == (now | kBeingTaken)) {
      std::this_thread::yield();
      known = generation_.load();
    } else if (generation_.compare_exchange_weak(known, now | kBeingTaken)) {
      // What its parent was doing. The mutex may be held for good by a thread that the child does not have.
      save_.reset();
      std::construct_at(&mutex_);
      generation_.store(now);
      break;
    }
  }
  return std::unique_lock(mutex_);
}

Result<std::unique_ptr<Store::Lock>> Store::lock(bool may_create) const {
  const std::string path = fmt::format("{}/{}", directory_, kLockFile);
  auto lock = std::make_unique<Lock>(path, O_RDWR | (may_create ? O_CREAT : 0));
  if (!lock->fd.valid() && may_create)
    return std::unexpected(system_error(lock->fd.open_error(), "opening the lock " + path, path));
  if (lock->held.busy()) return busy(directory_);
  return lock;  // advisory: where the filesystem has no locks, nobody is kept out
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
  const StepEntry* last = nullptr;
  for (const StepEntry& entry : *entries) {
    if (entry.commits.empty()) continue;
    if (last == nullptr || entry.commits.back() > last->commits.back()) last = &entry;
  }
  return last == nullptr ? std::nullopt : std::optional(last->step);
}

Result<Manifest> Store::read_manifest(std::uint64_t step) const {
  return read_newest_manifest(directory_, step);
}

// A directory that was there before, and is not now that another filesystem lies under it, was unmounted.
Status Store::check_device() const {
  const auto now = device_of_directory(directory_);
  if (!now) return std::unexpected(now.error());
  if (!device_ || *now || device_under(directory_) == device_) return {};
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = ENOENT,
            .message = fmt::format("cannot save into {}: the directory has gone, and its filesystem with it; "
                                   "mount that again, and the next save goes on",
                                   directory_),
            .path = directory_});
}

// What everything else lies in. One that a user removed is made anew.
Status Store::make_directory() {
  if (auto mounted = check_device(); !mounted) return mounted;
  if (auto ours = check_not_foreign(directory_); !ours) return ours;
  return changes_.make_directories_durably(directory_);
}

// Makes the descriptor in the directory what it is to be; `descriptor_` is that. The lock is held.
Status Store::record_descriptor() {
  for (bool again = true;; again = false) {
    const auto recorded = read_store_descriptor(directory_);
    if (!recorded) return std::unexpected(recorded.error());
    descriptor_ = next_descriptor(*recorded);
    recorded_ = recorded->has_value();
    if (*recorded == descriptor_) return {};
    if (recorded_) {
      if (auto ours = check_homes(descriptor_, directory_); !ours) return ours;
    }
    const auto written = write_store_descriptor(directory_, descriptor_, *recorded, changes_);
    if (written) {
      recorded_ = true;
      return {};
    }
    if (written.error().code != EEXIST || recorded_ || !again) return written;
    // Where the filesystem has no locks, another process may have been first: that one's counts.
    for (const std::string& volume : descriptor_.volumes) {
      if (auto removed = changes_.remove_directory(volume); !removed) return removed;
    }
  }
}

// That the volumes are this directory's, now and on record for whoever copies it. `shards` as for begin().
Status Store::claim_volumes(const StoreDescriptor& descriptor, std::span<const std::uint64_t> shards) const {
  if (auto ours = check_homes(descriptor, directory_); !ours) return ours;
  for (const auto* volumes : {&descriptor.volumes, &descriptor.former_volumes}) {
    for (std::size_t i = 0; i < volumes->size(); ++i) {
      if (!is_directory((*volumes)[i])) continue;
      auto taken = take_home((*volumes)[i], directory_, changes_);
      const bool written_to = volumes == &descriptor.volumes && shards[i] > 0;
      if (!taken && (written_to || taken.error().kind != ErrorKind::system)) return taken;
    }
  }
  return {};
}

Status Store::make_step_directories(std::uint64_t step, std::span<const std::uint64_t> shards) const {
  // Also when they exist: whoever made them may have died before that was durable.
  const auto make = [&](const std::string& parent) -> Status {
    if (auto made = changes_.make_directory(fmt::format("{}/{}", parent, step_directory(step))); !made)
      return made;
    return changes_.sync_directory(parent);
  };
  if (auto made = make(directory_); !made) return made;
  for (std::size_t i = 0; i < descriptor_.volumes.size(); ++i) {
    if (shards[i] == 0) continue;
    const std::string& volume = descriptor_.volumes[i];
    if (!is_directory(volume)) {
      return std::unexpected(
          Error{.kind = ErrorKind::system,
                .code = ENOENT,
                .message = fmt::format("saving into {}: its directory {} is missing: ENOENT; "
                                       "mount that volume, or make the directory again",
                                       directory_, volume),
                .path = volume});
    }
    if (auto made = make(volume); !made) return made;
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
  auto locked = lock(true);
  if (!locked) return std::unexpected(locked.error());
  save->lock = std::move(*locked);
  save->step = step;
  // Again, since it was not locked before.
  if (auto ours = check_not_foreign(directory_); !ours) return std::unexpected(ours.error());
  if (auto recorded = record_descriptor(); !recorded) return std::unexpected(recorded.error());
  if (const auto device = device_of_directory(directory_)) device_ = *device;
  if (shards.size() != std::max<std::size_t>(1, descriptor_.volumes.size())) return other_volumes(directory_);
  if (auto claimed = claim_volumes(descriptor_, shards); !claimed) return std::unexpected(claimed.error());
  if (auto made = make_step_directories(step, shards); !made) return std::unexpected(made.error());
  save_ = std::move(save);

  Placement placement{.volumes = descriptor_.volumes, .shards = {}, .paths = {}};
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
//    there already is not touched. The writers write to temporary names and rename.
// 2. Each writer makes the contents of its shards durable (fsync) ...
// 3. ... then their names (fsync of the directory). It is done here again for all directories, at the cost
//    of nothing when it was done.
// 4. All ranks are done: the caller has heard from each. Here, every shard must be there with its size.
// 5. The manifest is written to a temporary name, and made durable (fsync). Its commit is larger than any
//    that the directory holds, so that of two manifests of one step the newer one counts.
// 6. It gets its name (rename, which replaces nothing).
// 7. The name is made durable (fsync of the directory). Only then is the checkpoint reported as saved.
// 8. Only now may older ones go: retain(), in the order of Sweep::sweep().
Result<std::uint64_t> Store::commit(Manifest manifest) {
  const auto guard = enter();
  if (!save_ || save_->committed) return invalid("commit: no save was begun");
  if (manifest.step != save_->step)
    return invalid(fmt::format("manifest: it is of step {}, and the save of {}", manifest.step, save_->step));
  const auto entries = list_steps(directory_);
  if (!entries) return std::unexpected(entries.error());
  manifest.commit = 1;
  for (const StepEntry& entry : *entries) {
    if (!entry.commits.empty()) manifest.commit = std::max(manifest.commit, entry.commits.back() + 1);
  }
  manifest.time = now();
  const auto text = format_manifest(manifest);
  if (!text) return std::unexpected(text.error());
  if (auto whole = check_shards(manifest); !whole) return std::unexpected(whole.error());
  std::set<std::string> directories{
      volume_step_directory(directory_, std::string(kOwnVolume), manifest.step)};
  for (const Shard& shard : manifest.shards)
    directories.insert(volume_step_directory(directory_, manifest.volumes[shard.volume], manifest.step));
  for (const std::string& each : directories) {
    if (auto synced = changes_.sync_directory(each); !synced) return std::unexpected(synced.error());
  }
  const std::string path = manifest_path(directory_, manifest.step, manifest.commit);
  if (auto written = changes_.create_file_durably(path, *text); !written)
    return std::unexpected(written.error());
  save_->committed = manifest.commit;
  return manifest.commit;
}

Result<SweepResult> Store::retain(std::optional<std::uint64_t> keep) {
  if (keep == 0U) return invalid("keep: must be at least 1, or nothing to keep all");
  const auto guard = enter();
  if (!save_ || !save_->committed) return invalid("retain: nothing was committed; commit a save first");
  auto entries = list_steps(directory_);
  if (!entries) return std::unexpected(entries.error());
  std::erase_if(*entries, [](const StepEntry& entry) { return entry.commits.empty(); });
  std::ranges::sort(*entries, std::greater(), [](const StepEntry& entry) { return entry.commits.back(); });
  Sweep sweep(directory_, descriptor_, changes_, Sweep::DryRun::no);
  std::vector<Error> damaged;
  std::vector<const StepEntry*> doomed;
  std::uint64_t kept = 0;
  for (const StepEntry& entry : *entries) {
    const auto whole = check_manifest(directory_, entry.step, entry.commits.back());
    if (!whole) {
      damaged.push_back(whole.error());
    } else if (keep && kept >= *keep && entry.commits.back() != save_->committed) {
      doomed.push_back(&entry);
    } else {
      ++kept;
      if (entry.commits.size() > 1) sweep.clean(entry);
    }
  }
  // The oldest first, so that a crash leaves no gap.
  for (const StepEntry* entry : std::views::reverse(doomed)) sweep.remove(*entry);
  SweepResult result = sweep.take_result();
  result.problems.insert(result.problems.end(), damaged.begin(), damaged.end());
  return result;
}

void Store::release() {
  const auto guard = enter();
  save_.reset();
}

Result<SweepResult> Store::abandon() {
  const auto guard = enter();
  const std::unique_ptr<Save> save = std::move(save_);
  if (!save || save->committed) return SweepResult{};
  auto commits = commits_in(directory_, save->step);
  if (!commits) return std::unexpected(commits.error());
  Sweep sweep(directory_, descriptor_, changes_, Sweep::DryRun::no);
  sweep.clean({.step = save->step, .commits = std::move(*commits)});
  return sweep.take_result();
}

Result<SweepResult> Store::collect(Sweep::DryRun dry_run) {
  return sweep_all(dry_run, dry_run == Sweep::DryRun::no);
}

Result<SweepResult> Store::collect_if_used() {
  struct stat status{};
  if (::stat(fmt::format("{}/{}", directory_, kLockFile).c_str(), &status) != 0) return SweepResult{};
  return sweep_all(Sweep::DryRun::no, false);
}

Result<SweepResult> Store::sweep_all(Sweep::DryRun dry_run, bool may_make_lock) {
  const auto guard = enter();
  SweepResult busy;
  busy.busy = true;
  if (save_) return busy;
  const auto is_ours = has_checkpoints(directory_);
  if (!is_ours) return std::unexpected(is_ours.error());
  if (!*is_ours) return SweepResult{};
  const auto locked = lock(may_make_lock);
  if (!locked && locked.error().code == EBUSY) return busy;
  if (!locked) return std::unexpected(locked.error());
  // As it is by now: the directories on volumes that another process has given up are not ours to search.
  const auto recorded = read_store_descriptor(directory_);
  if (!recorded) return std::unexpected(recorded.error());
  const StoreDescriptor descriptor = recorded->value_or(StoreDescriptor{.id = descriptor_.id, .volumes = {}});
  const std::vector<std::uint64_t> no_shards(descriptor.volumes.size());
  auto ours = dry_run == Sweep::DryRun::yes ? check_homes(descriptor, directory_)
                                            : claim_volumes(descriptor, no_shards);
  if (!ours) return std::unexpected(ours.error());
  Sweep sweep(directory_, descriptor, changes_, dry_run);
  sweep.clean_all();
  return sweep.take_result();
}

}  // namespace trunkline::checkpoint
