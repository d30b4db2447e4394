// Opening a Store, and what the first save makes in its directory: the descriptor, and the place of an
// earlier run.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/invalid_argument.h"
#include "checkpoint/descriptor_io.h"
#include "checkpoint/json_record.h"
#include "checkpoint/names.h"
#include "checkpoint/own_directory.h"
#include "checkpoint/set_aside.h"
#include "checkpoint/store.h"
#include "checkpoint/volume_owner.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

Result<std::string> absolute_path(const std::string& path, std::string_view argument) {
  if (path.empty() || path.find('\0') != std::string::npos)
    return invalid_argument(
        fmt::format("{}: the path \"{}\" is empty or contains a NUL byte", argument, path));
  std::error_code error;
  fs::path whole = fs::absolute(path, error);
  // Behind a symbolic link, ".." leads elsewhere than the names say.
  const bool has_parents = std::ranges::find(whole, fs::path("..")) != whole.end();
  if (!error) whole = has_parents ? fs::weakly_canonical(whole, error) : whole.lexically_normal();
  if (error) return std::unexpected(system_error(error.value(), "find the path of " + path, path));
  if (!whole.has_filename() && whole.has_relative_path()) whole = whole.parent_path();  // "a/b/"
  return whole.string();
}

// One that is missing is made by the first save.
Status check_not_a_file(const std::string& volume) {
  std::error_code error;
  const fs::file_status status = fs::status(volume, error);
  const bool is_file = fs::exists(status) && !fs::is_directory(status);
  if (!is_file && error != std::errc::not_a_directory) return {};
  return std::unexpected(Error{.kind = ErrorKind::system,
                               .code = ENOTDIR,
                               .message = fmt::format("volumes: {} is not a directory (ENOTDIR)", volume),
                               .path = volume});
}

Result<std::vector<std::string>> absolute_volumes(const std::vector<std::string>& paths) {
  std::vector<std::string> volumes;
  for (const std::string& path : paths) {
    auto volume = absolute_path(path, "volumes");
    if (!volume) return std::unexpected(volume.error());
    if (std::ranges::find(volumes, *volume) != volumes.end())
      return invalid_argument(fmt::format("volumes: {} is listed twice", *volume));
    if (auto usable = check_not_a_file(*volume); !usable) return std::unexpected(usable.error());
    volumes.push_back(std::move(*volume));
  }
  return volumes;
}

bool is_at_or_below(const std::string& path, const std::string& directory) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(path, error);
  const fs::path above = error ? fs::path() : fs::weakly_canonical(directory, error);
  return !error && std::ranges::mismatch(above, whole).in1 == above.end();
}

// Manifests name shards on volumes by absolute paths: a directory that holds them itself, and is renamed,
// loses its own. Another disk that is mounted in it may stay there. Directories that have such volumes keep
// them.
Status check_not_within(const std::vector<std::string>& volumes, const std::string& directory,
                        const std::optional<StoreDescriptor>& recorded) {
  const std::vector<std::string> known =
      recorded ? parents_of(recorded->volumes) : std::vector<std::string>{};
  for (const std::string& volume : volumes) {
    if (std::ranges::find(known, volume) != known.end() || !is_at_or_below(volume, directory)) continue;
    if (device_under(volume + "/x") != device_under(directory + "/x")) continue;
    return invalid_argument(fmt::format(
        "volumes: {} lies in {}, the directory of checkpoints itself, which would lose the shards "
        "there when it is renamed; leave volumes out to have them in it, or name a directory beside "
        "it",
        volume, directory));
  }
  return {};
}

std::unexpected<Error> no_store(const std::string& directory, bool exists) {
  return std::unexpected(Error{
      .kind = ErrorKind::system,
      .code = ENOENT,
      .message = exists ? fmt::format("{} is not a directory of checkpoints: it has neither {} nor steps "
                                      "in it; {}",
                                      directory, kDescriptorFile, advice_for(directory))
                        : fmt::format("{} is not a directory of checkpoints: it does not exist; name the "
                                      "directory that a Checkpointer was given",
                                      directory),
      .path = directory});
}

std::uint64_t first_commit_of(const std::optional<StoreDescriptor>& descriptor) {
  return descriptor ? descriptor->first_commit : 1;
}

// Steps move once the directory has its new descriptor.
std::unexpected<Error> stopped_midway(const std::string& directory, const StoreDescriptor& after,
                                      Error error) {
  const auto descriptor = read_store_descriptor(directory);
  if (descriptor && id_of(*descriptor) == after.id)
    error.message += fmt::format(
        "; it stopped while the earlier run was set aside: each of its checkpoints is "
        "whole, in {} or in the newest folder aside-* there",
        directory);
  return std::unexpected(std::move(error));
}

}  // namespace

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
  if (auto apart = check_not_within(volumes.value_or(std::vector<std::string>{}), *path, *recorded); !apart)
    return std::unexpected(apart.error());
  const auto is_begun = has_checkpoints(*path);
  if (!is_begun) return std::unexpected(is_begun.error());
  // What is there can be loaded, whatever keeps it from being saved to.
  if (!*is_begun) {
    const bool creates = options.if_missing == IfMissing::create;
    if (auto ours = creates ? check_not_foreign(*path) : check_not_a_volume(*path); !ours)
      return std::unexpected(ours.error());
    if (!creates) return no_store(*path, device->has_value());
  }
  std::unique_ptr<Store> store(
      new Store(std::move(*path), std::move(volumes), DirectoryOps(options.watch), options.collection_pace));
  store->device_ = *device;
  store->fresh_ = options.fresh;
  store->recorded_ = recorded->has_value();
  store->state_->descriptor = store->next_descriptor(*recorded);
  if (recorded->has_value() && *recorded != store->state_->descriptor) {
    if (options.if_missing == IfMissing::fail)
      return invalid_argument(fmt::format(
          "volumes: they differ from those on which {} has its shards; leave volumes out to open it as it is",
          store->directory()));
    if (auto ours = check_owners(store->state_->descriptor, store->directory()); !ours)
      return std::unexpected(ours.error());
  }
  return store;
}

std::optional<std::string> Store::aside() {
  const auto guard = state_->enter();
  return state_->aside;
}

StoreDescriptor Store::descriptor() {
  const auto guard = state_->enter();
  return state_->descriptor;
}

// What the descriptor is to be. A directory whose descriptor has gone since this store saw it gets a new id:
// it may have been moved away, with the shards that its manifests name on the volumes, and those of the old
// id must never count as debris here.
StoreDescriptor Store::next_descriptor(const std::optional<StoreDescriptor>& recorded) const {
  if (recorded) return volumes_ ? with_volumes(*recorded, *volumes_, directory()) : *recorded;
  if (!recorded_ && !state_->descriptor.id.empty()) return state_->descriptor;
  const StoreDescriptor none{.id = random_hex(kIdDigits),
                             .volumes = {},
                             .first_commit = next_commit(directory(), {}, state_->descriptor.first_commit)};
  return with_volumes(none, volumes_ ? *volumes_ : parents_of(state_->descriptor.volumes), directory());
}

// A directory that was there before, and is not now that another filesystem lies under it, was unmounted.
Status Store::check_device() const {
  const auto now = device_of_directory(directory());
  if (!now) return std::unexpected(now.error());
  if (!device_ || *now == device_) return {};
  if (*now) {  // a mount point stays when what was mounted there has gone
    if (!recorded_) return {};
    const auto recorded = read_store_descriptor(directory());
    if (!recorded) return std::unexpected(recorded.error());
    if (*recorded) return {};
  } else if (device_under(directory()) == device_) {
    return {};
  }
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = ENOENT,
            .message = fmt::format("cannot save into {}: its checkpoints are gone, as is the filesystem they "
                                   "were on; mount it again, then save",
                                   directory()),
            .path = directory()});
}

// What everything else lies in. One that a user removed is made anew.
Status Store::make_directory() {
  if (auto mounted = check_device(); !mounted) return mounted;
  if (auto ours = check_not_foreign(directory()); !ours) return ours;
  return state_->ops.make_directories_durably(directory());
}

// Makes the descriptor in the directory what it is to be; `state_->descriptor` is that. The lock is held.
Status Store::record_descriptor(const EarlierSteps& earlier, const DirectoryOps& ops) {
  for (bool again = true;; again = false) {
    const auto recorded = read_store_descriptor(directory());
    if (!recorded) return std::unexpected(recorded.error());
    state_->descriptor = next_descriptor(*recorded);
    // Where a run begins, not where one is set aside: if that stops midway, what is left belongs to this one.
    if (earlier.none)
      state_->descriptor.first_commit = next_commit(directory(), {}, state_->descriptor.first_commit);
    recorded_ = recorded->has_value();
    if (*recorded == state_->descriptor) return {};
    if (recorded_) {
      if (auto ours = check_owners(state_->descriptor, directory()); !ours) return ours;
    }
    const auto written = write_store_descriptor(directory(), state_->descriptor, *recorded, ops);
    if (written) {
      recorded_ = true;
      return {};
    }
    if (written.error().code != EEXIST || recorded_ || !again) return written;
    // Where the filesystem has no locks, another process may have been first: that one's counts.
    for (const std::string& volume : state_->descriptor.volumes) {
      if (auto removed = ops.remove_directory(volume); !removed) return removed;
    }
  }
}

// Whether a save of the step goes on from what is in the directory; if not, with StoreOptions::fresh, what is
// in it goes aside. The lock is held.
Result<Store::EarlierSteps> Store::settle_earlier_steps(std::uint64_t step, const DirectoryLock& lock,
                                                        const DirectoryOps& ops) {
  const auto recorded = read_store_descriptor(directory());
  if (!recorded) return std::unexpected(recorded.error());
  follow_own_descriptor(*recorded);
  const std::string id = id_of(*recorded);
  const auto entries = state_->list(lock);
  if (!entries) return std::unexpected(entries.error());
  const bool none_there =
      std::ranges::all_of(*entries, [](const StepEntry& entry) { return entry.commits.empty(); });
  if (!fresh_) {
    const std::uint64_t first = first_commit_of(*recorded);
    if (auto goes_on = checkpoint::check_continues(directory(), id, step, *entries, state_->known, first);
        !goes_on)
      return std::unexpected(goes_on.error());
    return EarlierSteps{.none = none_there,
                        .of_another_run = !id.empty() && state_->known.loaded.id != id,
                        .directory_was_replaced = was_replaced(directory(), *entries, state_->known)};
  }
  if (none_there) return EarlierSteps{.none = true};
  if (const std::optional<StoreDescriptor>& known = *recorded) {
    if (auto ours = check_owners(*known, directory()); !ours) return std::unexpected(ours.error());
  }
  if (auto can_be = check_can_be_set_aside(directory(), *recorded); !can_be)
    return std::unexpected(can_be.error());
  // Which steps were moved back stays on record, also if this stops midway.
  const StoreDescriptor none{
      .id = random_hex(kIdDigits), .volumes = {}, .first_commit = first_commit_of(*recorded)};
  const auto volumes = volumes_ ? *volumes_ : parents_of(recorded->value_or(none).volumes);
  const StoreDescriptor after = with_volumes(none, volumes, directory());
  auto moved = set_aside(directory(), *recorded, after, ops);
  if (!moved) return stopped_midway(directory(), after, std::move(moved.error()));
  state_->aside = *std::move(moved);
  fresh_ = false;  // also if this save fails: what is there at the next one may be another job's
  state_->known = {};
  state_->descriptor = after;
  recorded_ = true;
  return EarlierSteps{.none = true};
}

// What was loaded from a directory without a descriptor stays known once this store has given it one, also by
// a begin() that failed after that.
void Store::follow_own_descriptor(const std::optional<StoreDescriptor>& recorded) {
  if (recorded && state_->known.loaded.id.empty() && recorded->id == state_->descriptor.id)
    state_->known.loaded.id = recorded->id;
}

Result<Position> Store::position() const { return position_of(directory()); }

void Store::continue_from(Position position) {
  const auto guard = state_->enter();
  // What was saved while it was loaded stays known.
  if (state_->known.loaded.id != position.id) state_->known.saved = {};
  state_->known.loaded = std::move(position);
  state_->known.directory = directory_id_of(directory());
  fresh_ = false;
}

void Store::start_over(bool fresh) {
  const auto guard = state_->enter();
  state_->known = {};
  fresh_ = fresh;
}

Status Store::check_continues(std::uint64_t step) {
  const auto guard = state_->enter();
  if (auto ours = check_not_foreign(directory()); !ours) return ours;
  if (auto own = check_not_of_dcp(directory(), step); !own) return own;
  if (fresh_) return {};
  if (auto own = check_not_a_link(directory(), step); !own) return own;
  const auto recorded = read_store_descriptor(directory());
  if (!recorded) return std::unexpected(recorded.error());
  follow_own_descriptor(*recorded);
  const auto entries = list_steps(directory());
  if (!entries) return std::unexpected(entries.error());
  const std::string id = id_of(*recorded);
  return checkpoint::check_continues(directory(), id, step, *entries, state_->known,
                                     first_commit_of(*recorded));
}

}  // namespace trunkline::checkpoint
