#include "checkpoint/home.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "checkpoint/home_record.h"
#include "checkpoint/listing.h"
#include "checkpoint/names.h"
#include "checkpoint/open_store.h"
#include "checkpoint/own_directory.h"
#include "os/read_text.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string record_path(const std::string& volume) { return fmt::format("{}/{}", volume, kHomeFile); }

// nullopt: this directory has no record, or is not there.
Result<std::optional<Home>> read_home(const std::string& volume) {
  const std::string record = record_path(volume);
  const auto text = os::read_text(record);
  if (!text && (text.error().code == ENOENT || text.error().code == ENOTDIR)) return std::nullopt;
  if (!text) return std::unexpected(text.error());
  auto home = parse_home(*text, record);
  if (!home) return std::unexpected(home.error());
  return std::move(*home);
}

// nullopt: there is no directory at that path.
Result<std::optional<Home>> look_at(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0) {
    if (!S_ISDIR(status.st_mode)) return std::nullopt;
    return Home{.path = path, .device = status.st_dev, .inode = status.st_ino};
  }
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  return std::unexpected(system_error(errno, "looking for the directory of checkpoints " + path, path));
}

Result<Home> home_of(const std::string& directory) {
  std::error_code error;
  const fs::path canonical = fs::canonical(directory, error);
  const auto found = look_at(error ? directory : canonical.string());
  if (!found) return std::unexpected(found.error());
  if (const std::optional<Home>& home = *found) return *home;
  return std::unexpected(system_error(ENOENT, "looking at " + directory, directory));
}

// Whether a directory keeps shards in `volume`. What cannot be read may be what says so.
bool refers_to(const std::string& directory, const std::string& volume) {
  const auto descriptor = read_store_descriptor(directory);
  if (!descriptor) return true;
  const auto is_volume = [&](const std::vector<std::string>& volumes) {
    return std::ranges::find(volumes, volume) != volumes.end();
  };
  const auto& known = *descriptor;
  if (known && (known->owns(volume) || is_volume(known->volumes) || is_volume(known->former_volumes)))
    return true;
  const auto entries = list_steps(directory);
  if (!entries) return true;
  return std::ranges::any_of(*entries, [&](const StepEntry& entry) {
    if (entry.commits.empty()) return false;
    const auto manifest = read_manifest_of(directory, entry.step, entry.commits.back());
    return !manifest || is_volume(manifest->volumes);
  });
}

// Whether checkpoints of `directory` name all the shards in `volume`. An older copy does not know the newer
// ones.
bool knows_all(const std::string& directory, const std::string& volume) {
  const auto steps = step_directories_in(volume);
  if (!steps) return false;
  return std::ranges::all_of(*steps, [&](std::uint64_t step) {
    auto names = names_in(volume_step_directory(directory, volume, step));
    if (!names) return false;
    std::erase_if(*names, [](const std::string& name) { return !is_shard_file(name); });
    if (names->empty()) return true;
    const auto manifest = read_newest_manifest(directory, step);
    return manifest && std::ranges::all_of(*names, [&](const std::string& name) {
             return std::ranges::find(manifest->shards, name, &Shard::file) != manifest->shards.end();
           });
  });
}

std::unexpected<Error> is_a_copy(const std::string& volume, const std::string& directory, const Home& home) {
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format("{} is a copy of {}, whose shards {} holds: it can be read, and neither be saved into nor "
                  "have anything removed; use the original, or load from the copy and save into a new "
                  "directory, or remove the original if this one shall take its place",
                  directory, home.path, volume),
      directory));
}

std::unexpected<Error> may_be_a_copy(const std::string& volume, const std::string& directory,
                                     const Home& home, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      fmt::format(
          "{} holds shards of {}, which is not there, {}: {} may be a copy of it, and can be read, and "
          "neither be saved into nor have anything removed; use the original, mount what is missing, "
          "or, if that directory is gone for good, remove {}",
          volume, home.path, why, directory, record_path(volume)),
      directory));
}

// The record that there should be.
Result<Home> agreed_home(const std::string& volume, const std::string& directory,
                         const std::optional<Home>& recorded) {
  auto here = home_of(directory);
  if (!here) return std::unexpected(here.error());
  if (!recorded) return here;
  const auto there = look_at(recorded->path);
  if (!there) return std::unexpected(there.error());
  const std::optional<Home>& found = *there;
  if (found && found->is_same_directory(*here)) {
    here->path = recorded->path;  // by whichever of its names
    return here;
  }
  if (found && refers_to(recorded->path, volume)) return is_a_copy(volume, directory, *recorded);
  if (here->is_same_directory(*recorded)) return here;  // it was moved
  // Moved between filesystems, or a copy whose original is elsewhere now: in doubt nothing goes.
  if (!found && device_under(recorded->path) != recorded->device)
    return may_be_a_copy(volume, directory, *recorded, "and neither is its filesystem");
  if (!knows_all(directory, volume))
    return may_be_a_copy(volume, directory, *recorded, "and some that no checkpoint here names");
  return here;
}

}  // namespace

Status check_home(const std::string& volume, const std::string& directory) {
  const auto recorded = read_home(volume);
  if (!recorded) return std::unexpected(recorded.error());
  if (!*recorded) return {};
  const auto agreed = agreed_home(volume, directory, *recorded);
  if (!agreed) return std::unexpected(agreed.error());
  return {};
}

Status check_homes(const StoreDescriptor& descriptor, const std::string& directory) {
  for (const auto* volumes : {&descriptor.volumes, &descriptor.former_volumes}) {
    for (const std::string& volume : *volumes) {
      if (auto ours = check_home(volume, directory); !ours) return ours;
    }
  }
  return {};
}

Status take_home(const std::string& volume, const std::string& directory, const Changes& changes) {
  const auto recorded = read_home(volume);
  if (!recorded) return std::unexpected(recorded.error());
  const auto agreed = agreed_home(volume, directory, *recorded);
  if (!agreed) return std::unexpected(agreed.error());
  if (*recorded == *agreed) return {};
  return changes.replace_file_durably(record_path(volume), format_home(*agreed));
}

}  // namespace trunkline::checkpoint
