#include "checkpoint/volume_owner.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "checkpoint/descriptor_io.h"
#include "checkpoint/listing.h"
#include "checkpoint/names.h"
#include "checkpoint/own_directory.h"
#include "checkpoint/volume_owner_record.h"
#include "os/file_type.h"
#include "os/read_text.h"
#include "os/same_file.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string record_path(const std::string& volume) { return fmt::format("{}/{}", volume, kOwnerFile); }

// nullopt: this directory has no record, or does not exist.
Result<std::optional<VolumeOwner>> read_owner(const std::string& volume) {
  const std::string record = record_path(volume);
  const auto text = os::read_text(record);
  if (!text && (text.error().code == ENOENT || text.error().code == ENOTDIR)) return std::nullopt;
  if (!text) return std::unexpected(text.error());
  auto owner = parse_volume_owner(*text, record);
  if (!owner) return std::unexpected(owner.error());
  return std::move(*owner);
}

// When the directory was created, in nanoseconds since 1970; 0 where the filesystem does not record it.
// nullopt: there is no directory at that path.
Result<std::optional<VolumeOwner>> identity_of(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0) {
    if (!S_ISDIR(status.st_mode)) return std::nullopt;
    return VolumeOwner{
        .path = path, .device = status.st_dev, .inode = status.st_ino, .birth = os::birth_of(path)};
  }
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  return std::unexpected(system_error(errno, "stat the directory of checkpoints " + path, path));
}

Result<VolumeOwner> owner_at(const std::string& directory) {
  std::error_code error;
  const fs::path canonical = fs::canonical(directory, error);
  const auto found = identity_of(error ? directory : canonical.string());
  if (!found) return std::unexpected(found.error());
  if (const std::optional<VolumeOwner>& owner = *found) return *owner;
  return std::unexpected(system_error(ENOENT, "stat " + directory, directory));
}

// Whether a directory keeps shards in `volume`. True for what cannot be read, since it might say so.
bool refers_to(const std::string& directory, const std::string& volume) {
  const auto descriptor = read_store_descriptor(directory);
  if (!descriptor) return true;
  const auto is_volume = [&](const std::vector<std::string>& volumes) {
    return std::ranges::find(volumes, volume) != volumes.end();
  };
  const auto& known = *descriptor;
  if (known && (known->owns(volume) || is_volume(known->all_volumes()))) return true;
  const auto entries = list_steps(directory);
  if (!entries) return true;
  return std::ranges::any_of(*entries, [&](const StepEntry& entry) {
    if (entry.commits.empty()) return false;
    const auto manifest = read_manifest_of(directory, entry.step, entry.commits.back());
    return !manifest || is_volume(manifest->volumes);
  });
}

std::unexpected<Error> not_the_owner(const std::string& volume, const std::string& directory,
                                     std::string_view what, std::string_view remedy) {
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format(
          "{} {}. Checkpoints can be loaded from it, but it cannot be saved into, and nothing in it is "
          "removed, because its shards in {} would be lost to the directory they belong to. {}, or "
          "load from this one and save into a new directory",
          directory, what, volume, remedy),
      directory));
}

// Steps were moved back from a folder that set a run aside; their shards still belong to that folder.
std::unexpected<Error> has_steps_of(const std::string& volume, const std::string& directory,
                                    const VolumeOwner& aside) {
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format("{} holds steps that were moved out of {}, to which their shards in {} belong. They can be "
                  "loaded, and stay as they are. To delete one, move it back into that folder",
                  directory, aside.path, volume),
      directory));
}

bool is_set_aside_in(const VolumeOwner& here, const VolumeOwner& owner) {
  const fs::path path = owner.path;
  return path.parent_path() == fs::path(here.path) && is_aside_directory(path.filename().string());
}

std::unexpected<Error> is_a_copy(const std::string& volume, const std::string& directory,
                                 const VolumeOwner& owner) {
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format("{} is a copy of {}, and read-only: both use the shards in {}. Save into the original, or "
                  "load from the copy and save into a new directory. Only if {} and the steps that it alone "
                  "has are not needed any more: remove it, and run: trunkline checkpoint adopt {}",
                  directory, owner.path, volume, owner.path, directory),
      directory));
}

std::unexpected<Error> may_be_a_copy(const std::string& volume, const std::string& directory,
                                     std::string_view what) {
  return not_the_owner(volume, directory, what,
                       fmt::format("Use the original; if this directory is to take its place, run: trunkline "
                                   "checkpoint adopt {}",
                                   directory));
}

// A crash while a run was set aside, before its folder was recorded (set_aside.h): the recorded directory
// still exists, contains the folder, and has no checkpoints on the volume any more.
bool is_folder_of(const VolumeOwner& here, const VolumeOwner& owner, const VolumeOwner& found) {
  const fs::path path = here.path;
  return found.is_same_directory(owner) && path.parent_path() == fs::path(found.path) &&
         is_aside_directory(path.filename().string());
}

// The correct record. HERE is a copy unless it is the recorded directory, and not a snapshot of it while that
// is in its place. A copy never replaces its original by itself: whether the original is gone, or was renamed
// and is still in use, cannot be determined from here.
Result<VolumeOwner> agreed_owner(const std::string& volume, const std::string& directory,
                                 const std::optional<VolumeOwner>& recorded) {
  auto here = owner_at(directory);
  if (!here) return std::unexpected(here.error());
  if (!recorded) return here;
  const auto there = identity_of(recorded->path);
  if (!there) return std::unexpected(there.error());
  const std::optional<VolumeOwner>& found = *there;
  if (found && found->is_same_now(*here)) {
    const bool has_same_inode = recorded->inode == here->inode && (recorded->birth == 0 || here->birth == 0);
    if (here->is_same_directory(*recorded) || has_same_inode || os::has_unstable_inodes(directory)) {
      here->path = recorded->path;  // keeps the recorded one of its names
      return here;
    }
    return may_be_a_copy(
        volume, directory,
        "is not the directory that saved these checkpoints, but a copy in its place: it was "
        "copied, or restored from a backup, and the original may be in use under another name");
  }
  const bool is_in_place = found && found->is_same_directory(*recorded);
  if (here->is_same_directory(*recorded) && !is_in_place) return here;  // it was renamed
  if (found && refers_to(recorded->path, volume)) {
    if (is_set_aside_in(*here, *recorded)) return has_steps_of(volume, directory, *recorded);
    return is_a_copy(volume, directory, *recorded);
  }
  if (here->is_same_directory(*recorded)) return here;
  if (!found) {
    const bool mounted = device_under(recorded->path) == recorded->device;
    return may_be_a_copy(volume, directory,
                         fmt::format("may be a copy of {}, which does not exist now{}", recorded->path,
                                     mounted ? "" : ", nor does its filesystem (is it mounted?)"));
  }
  if (is_folder_of(*here, *recorded, *found)) return here;
  return may_be_a_copy(
      volume, directory,
      fmt::format("may be a copy of the directory formerly at {}, which now has other files or none",
                  recorded->path));
}

}  // namespace

Status check_owner(const std::string& volume, const std::string& directory) {
  const auto recorded = read_owner(volume);
  if (!recorded) return std::unexpected(recorded.error());
  if (!*recorded) return {};
  const auto agreed = agreed_owner(volume, directory, *recorded);
  if (!agreed) return std::unexpected(agreed.error());
  return {};
}

Status check_recorded_owner(const std::string& volume, const std::string& directory) {
  const auto recorded = read_owner(volume);
  if (!recorded) return std::unexpected(recorded.error());
  if (*recorded) return check_owner(volume, directory);
  if (!os::is_directory(volume)) return {};
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format("{} has lost its file {}, which says which directory owns its shards; nothing in it is "
                  "removed until that directory saves again. If {} is a copy, do not save into it",
                  volume, kOwnerFile, directory),
      volume));
}

Status check_owners(const StoreDescriptor& descriptor, const std::string& directory) {
  for (const std::string& volume : descriptor.all_volumes()) {
    if (auto ours = check_owner(volume, directory); !ours) return ours;
  }
  return {};
}

Status record_owner(const std::string& volume, const std::string& directory, const DirectoryOps& ops) {
  const auto recorded = read_owner(volume);
  if (!recorded) return std::unexpected(recorded.error());
  const auto agreed = agreed_owner(volume, directory, *recorded);
  if (!agreed) return std::unexpected(agreed.error());
  if (*recorded == *agreed) {
    std::ignore = ::utimensat(AT_FDCWD, record_path(volume).c_str(), nullptr, 0);
    return {};
  }
  return ops.replace_file_durably(record_path(volume), format_volume_owner(*agreed));
}

Status check_can_adopt(const std::string& volume, const std::string& directory) {
  const auto here = owner_at(directory);
  if (!here) return std::unexpected(here.error());
  const auto recorded = read_owner(volume);
  if (!recorded) return {};  // an unreadable record proves nothing; the user has decided
  const std::optional<VolumeOwner>& owner = *recorded;
  if (!owner) return {};
  const auto there = identity_of(owner->path);
  if (!there) return std::unexpected(there.error());
  const std::optional<VolumeOwner>& found = *there;
  if (found && !found->is_same_now(*here) && refers_to(owner->path, volume))
    return is_a_copy(volume, directory, *owner);
  return {};
}

Status adopt_volume(const std::string& volume, const std::string& directory, const DirectoryOps& ops) {
  if (auto can = check_can_adopt(volume, directory); !can) return can;
  const auto here = owner_at(directory);
  if (!here) return std::unexpected(here.error());
  return ops.replace_file_durably(record_path(volume), format_volume_owner(*here));
}

std::optional<std::string> why_gone(const std::string& volume, const std::string& directory,
                                    std::uint64_t step) {
  const auto recorded = read_owner(volume);
  if (!recorded) return std::nullopt;
  const std::optional<VolumeOwner>& owner = *recorded;
  if (!owner || check_owner(volume, directory)) return std::nullopt;
  const auto here = owner_at(directory);
  const std::string& path = owner->path;
  const bool in_its_place = here && here->path == path;
  return fmt::format("{} is a copy, and its shards belong to {}, where step {} was removed", directory,
                     in_its_place ? "the directory that was in its place before" : path, step);
}

}  // namespace trunkline::checkpoint
