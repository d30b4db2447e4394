#include "checkpoint/set_aside.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "base/utc_time.h"
#include "checkpoint/descriptor_io.h"
#include "checkpoint/json_record.h"
#include "checkpoint/listing.h"
#include "checkpoint/names.h"
#include "checkpoint/own_directory.h"
#include "checkpoint/volume_owner.h"
#include "os/file_type.h"
#include "os/replaceable.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr unsigned kMaxFolders = 1000;  // within one second

std::vector<std::string> existing_volumes(const StoreDescriptor& descriptor) {
  std::vector<std::string> volumes = descriptor.all_volumes();
  std::erase_if(volumes, [](const std::string& volume) { return !os::exists(volume); });
  return volumes;
}

// Creates a new folder with a descriptor; the folder belongs to the process that creates the descriptor.
Result<std::string> make_folder(const std::string& directory, const StoreDescriptor& descriptor,
                                const DirectoryOps& ops) {
  // For people to read: nothing is ordered by it, since clocks jump.
  const std::string time = utc_time_for_name(std::time(nullptr));
  for (unsigned number = 1; number <= kMaxFolders; ++number) {
    std::string path = fmt::format("{}/{}", directory, aside_directory(time, number));
    if (os::exists(path)) continue;
    if (auto made = ops.make_directory(path); !made) return std::unexpected(made.error());
    // Its volumes exist: they are the directory's.
    const auto written = write_store_descriptor(path, descriptor, std::nullopt, ops);
    if (!written && written.error().code == EEXIST) continue;
    if (!written) return std::unexpected(written.error());
    if (auto synced = ops.sync_directory(directory); !synced) return std::unexpected(synced.error());
    return path;
  }
  return std::unexpected(
      system_error(EEXIST, fmt::format("create a folder aside-{} in {}", time, directory), directory));
}

// All but foreign steps, in the order of their commits; those without a commit come first.
Result<std::vector<StepEntry>> own_steps_in(const std::string& directory) {
  auto steps = list_steps(directory);
  if (!steps) return steps;
  std::erase_if(*steps, [&](const StepEntry& entry) {
    return is_foreign_step(fmt::format("{}/{}", directory, step_directory(entry.step)));
  });
  std::ranges::sort(*steps, {}, [](const StepEntry& entry) {
    return std::pair(entry.commits.empty() ? 0 : entry.commits.back(), entry.step);
  });
  return steps;
}

}  // namespace

Status check_can_be_set_aside(const std::string& directory, const std::optional<StoreDescriptor>& before) {
  if (before) {
    for (const std::string& volume : before->volumes) {
      if (os::is_directory(volume)) continue;
      return std::unexpected(
          Error{.kind = ErrorKind::system,
                .code = ENOENT,
                .message = fmt::format("cannot set the checkpoints in {} aside: their directory {} is "
                                       "missing: ENOENT; mount that volume, or use another directory",
                                       directory, volume),
                .path = volume});
    }
  }
  const auto steps = own_steps_in(directory);
  if (!steps) return std::unexpected(steps.error());
  for (const StepEntry& entry : *steps) {
    const std::string path = fmt::format("{}/{}", directory, step_directory(entry.step));
    const std::string action =
        fmt::format("set the checkpoints in {} aside: cannot move {}", directory, path);
    if (auto movable = os::check_replaceable(path, action); !movable) return movable;
    if (!os::is_symlink(path)) {
      // Moving a directory changes its "..", so it must be writable.
      if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0 && errno == EACCES)
        return std::unexpected(system_error(EACCES, action, path));
      continue;
    }
    std::error_code error;
    if (fs::read_symlink(path, error).is_absolute()) continue;
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format("cannot set the checkpoints in {} aside: {} is a relative symbolic link, which would "
                    "lead elsewhere; replace it by an absolute one, or use another directory",
                    directory, path),
        path));
  }
  return {};
}

// Volumes dictate the order: a directory searches the ones that its descriptor owns for debris, so no two
// descriptors may own a volume while steps of both have shards there.
// 0. Record the directory as the owner (volume_owner.h) of its volumes.
// 1. Create the folder, durably, with a copy of the descriptor. It has no steps and does not own the volumes:
//    it may remove nothing there.
// 2. Give the directory a descriptor with another id, and new directories on the volumes. From here on it
//    searches only those; the steps that are still in it can be read, saved after, and removed one by one.
//    While it has any, it owns their volumes, and the folder removes nothing there.
// 3. Move the steps, each by one rename, and make both directories durable. The step that was committed last
//    moves last: until then it is the latest, and what is committed after a crash gets a higher number.
// 4. Make the folder the owner. Earlier, it would have taken the shards of steps that were not moved yet for
//    debris.
//
// A crash at any point leaves each step in one of the two; setting aside again moves the rest into another
// folder.
Result<std::string> set_aside(const std::string& directory, const std::optional<StoreDescriptor>& before,
                              const StoreDescriptor& after, const DirectoryOps& ops) {
  const StoreDescriptor old =
      before.value_or(StoreDescriptor{.id = random_hex(kIdDigits), .volumes = {}, .former_volumes = {}});
  for (const std::string& volume : existing_volumes(old)) {
    if (auto taken = record_owner(volume, directory, ops); !taken) return std::unexpected(taken.error());
  }
  auto folder = make_folder(directory, old, ops);
  if (!folder) return folder;
  if (auto written = write_store_descriptor(directory, after, before, ops); !written)
    return std::unexpected(written.error());
  const auto steps = own_steps_in(directory);
  if (!steps) return std::unexpected(steps.error());
  for (const StepEntry& entry : *steps) {
    const std::string name = step_directory(entry.step);
    const std::string from = fmt::format("{}/{}", directory, name);
    if (auto moved = ops.rename(from, fmt::format("{}/{}", *folder, name)); !moved)
      return std::unexpected(moved.error());
  }
  for (const std::string& each : {*folder, directory}) {
    if (auto synced = ops.sync_directory(each); !synced) return std::unexpected(synced.error());
  }
  for (const std::string& volume : existing_volumes(old)) {
    // Even where a manifest in the folder cannot be read: everything has moved there.
    if (auto given = adopt_volume(volume, *folder, ops); !given) return std::unexpected(given.error());
  }
  return folder;
}

}  // namespace trunkline::checkpoint
