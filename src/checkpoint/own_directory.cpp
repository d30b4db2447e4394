#include "checkpoint/own_directory.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/listing.h"
#include "checkpoint/manifest.h"
#include "checkpoint/names.h"
#include "checkpoint/volume_owner_record.h"
#include "os/read_text.h"
#include "os/temporary_file.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

// Names that trunkline.dcp and torch's FileSystemWriter give to manifests and to files with tensors. If a
// rank was killed, the latter may be all there is.
bool is_dcp_name(const std::string& name) {
  return (name.starts_with("dcp") && name.ends_with(".manifest")) ||
         (name.starts_with("rank") && name.ends_with(".shard")) || name.ends_with(".distcp") ||
         name == ".metadata" || (name.starts_with("__") && name.ends_with(".metadata"));
}

bool is_of_a_save(const std::string& name) {
  return commit_of(name) || is_shard_file(name) || os::is_temporary_name(name);
}

bool is_manifest(std::string_view name) { return commit_of(name).has_value(); }

// Whether a step's directory has a file of the kind.
bool has_any(const std::string& step_directory, bool (*is_of_kind)(std::string_view)) {
  const auto names = names_in(step_directory);
  return names && std::ranges::any_of(*names, is_of_kind);
}

// The directory of checkpoints whose shards this one holds, according to its record.
std::optional<std::string> owner_of(const std::string& volume) {
  const std::string record = fmt::format("{}/{}", volume, kOwnerFile);
  const auto text = os::read_text(record);
  auto owner = text ? parse_volume_owner(*text, record) : std::unexpected(text.error());
  if (!owner) return std::nullopt;
  return std::move(owner->path);
}

std::unexpected<Error> not_a_directory(const std::string& directory, std::string_view why) {
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = ENOTDIR,
            .message = fmt::format("{} cannot hold checkpoints (ENOTDIR): {}", directory, why),
            .path = directory});
}

bool counts_as_foreign(const std::string& name) {
  return !name.starts_with('.') && name != "lost+found" && name != kLockFile && !is_aside_directory(name);
}

// The manifest of a single step.
std::optional<Manifest> manifest_in(const std::string& directory, std::span<const std::string> names) {
  for (const std::string& name : names) {
    if (!commit_of(name)) continue;
    const std::string path = fmt::format("{}/{}", directory, name);
    const auto text = os::read_text(path);
    auto manifest = text ? parse_manifest(*text, path) : std::unexpected(text.error());
    if (manifest) return std::move(*manifest);
  }
  return std::nullopt;
}

}  // namespace

bool is_of_dcp(const std::string& directory) {
  const auto names = names_in(directory);
  return names && std::ranges::any_of(*names, is_dcp_name);
}

bool is_foreign_step(const std::string& step_directory) {
  const auto names = names_in(step_directory);
  return names && !names->empty() && std::ranges::none_of(*names, is_of_a_save);
}

std::string advice_for(const std::string& directory) {
  const fs::path path(directory);
  const std::vector<std::string> names = names_in(directory).value_or(std::vector<std::string>{});
  const bool is_step = std::ranges::any_of(names, is_manifest);
  const auto called = step_of(path.filename().string());
  const auto manifest = is_step && !called ? manifest_in(directory, names) : std::nullopt;
  if (is_step && called)
    return fmt::format("it is step {} of {}; open that directory", *called, path.parent_path().string());
  // Shards on volumes belong to the directory that they were saved in, which may remove them.
  if (manifest &&
      std::ranges::any_of(manifest->volumes, [](const auto& each) { return each != kOwnVolume; })) {
    return fmt::format(
        "it is step {}, and its shards are on volumes that belong to the directory it was saved in: to load "
        "it, move it back there, as {}",
        manifest->step, step_directory(manifest->step));
  }
  if (manifest) {
    return fmt::format("it is a copy of step {}; put it into a directory of its own, as {}, and open that",
                       manifest->step, step_directory(manifest->step));
  }
  if (is_step) {
    return fmt::format("it is a single step; open the directory that holds it, in which a step is called {}",
                       step_directory(1));
  }
  if (is_of_dcp(directory))
    return "it is a checkpoint of torch.distributed.checkpoint; load it with the storage reader that matches "
           "its writer (trunkline.dcp.StorageReader, or torch's FileSystemReader)";
  for (const std::string& name : names) {
    if (step_of(name) && is_of_dcp(fmt::format("{}/{}", directory, name))) {
      return fmt::format(
          "its {} is a checkpoint of torch.distributed.checkpoint; load that with the storage reader that "
          "matches its writer (trunkline.dcp.StorageReader, or torch's FileSystemReader), and give those of "
          "a Checkpointer a directory of their own",
          name);
    }
    if (step_of(name) && has_any(fmt::format("{}/{}", directory, name), is_shard_file)) {
      return fmt::format(
          "its {} has shards but no manifest: they may belong to a directory of checkpoints that has "
          "volumes, "
          "or the manifests were removed. Open that directory, or another one",
          name);
    }
  }
  if (has_checkpoints(fmt::format("{}/checkpoints", directory)).value_or(false))
    return fmt::format("open {}/checkpoints, which is a directory of checkpoints", directory);
  return fmt::format(
      "name a directory of checkpoints; to save new ones, name a directory of their own, for example "
      "{}/checkpoints",
      directory);
}

Result<std::optional<std::uint64_t>> device_of_directory(const std::string& directory) {
  struct stat status{};
  if (::stat(directory.c_str(), &status) == 0) {
    if (!S_ISDIR(status.st_mode))
      return not_a_directory(directory,
                             "it is a file; name a directory of checkpoints. To verify a single file, call "
                             "trunkline.load(path, verify=True)");
    return status.st_dev;
  }
  if (errno == ENOTDIR)
    return not_a_directory(directory, "a part of the path is a file; check the spelling of the path");
  if (errno != ENOENT)
    return std::unexpected(system_error(errno, "stat the directory of checkpoints " + directory, directory));
  if (::lstat(directory.c_str(), &status) != 0) return std::nullopt;
  // Another process may have created it since.
  if (S_ISDIR(status.st_mode)) return status.st_dev;
  std::error_code error;
  const fs::path target = fs::read_symlink(directory, error);
  return not_a_directory(directory,
                         fmt::format("it is a symbolic link to {}, which does not exist; mount the disk that "
                                     "it leads to, or remove the link",
                                     target.string()));
}

std::optional<std::uint64_t> device_under(const std::string& path) {
  for (fs::path above = path; above.has_relative_path();) {
    above = above.parent_path();
    struct stat status{};
    if (::stat(above.c_str(), &status) == 0) return status.st_dev;
    if (errno != ENOENT && errno != ENOTDIR) return std::nullopt;
  }
  return std::nullopt;
}

Status check_not_a_volume(const std::string& directory) {
  const auto owner = owner_of(directory);
  std::error_code error;
  // A record that was copied here together with the shards proves nothing.
  if (!owner || fs::equivalent(*owner, directory, error)) return {};
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = ENOTEMPTY,
            .message = fmt::format("{} holds shards that belong to {} (according to its file {}); open {} "
                                   "instead. If nothing stores shards here, remove that file",
                                   directory, *owner, kOwnerFile, *owner),
            .path = directory});
}

Result<bool> has_checkpoints(const std::string& directory) {
  struct stat status{};
  if (::stat(fmt::format("{}/{}", directory, kDescriptorFile).c_str(), &status) == 0) return true;
  const auto steps = step_directories_in(directory);
  if (!steps) return std::unexpected(steps.error());
  return std::ranges::any_of(*steps, [&](std::uint64_t step) {
    return has_any(fmt::format("{}/{}", directory, step_directory(step)), is_manifest);
  });
}

Status check_not_foreign(const std::string& directory) {
  constexpr std::size_t kShown = 3;
  if (auto directly = check_not_a_volume(directory); !directly) return directly;
  const auto ours = has_checkpoints(directory);
  if (!ours) return std::unexpected(ours.error());
  if (*ours) return {};
  auto names = names_in(directory);
  if (!names) return std::unexpected(names.error());
  // Another process may have made it a directory of checkpoints since.
  const auto is_ours = [&](const std::string& name) {
    return name == kDescriptorFile ||
           (step_of(name) && has_any(fmt::format("{}/{}", directory, name), is_manifest));
  };
  if (std::ranges::any_of(*names, is_ours)) return {};
  std::erase_if(*names, [&](const std::string& name) {
    if (!step_of(name)) return !counts_as_foreign(name);
    const auto inside = names_in(fmt::format("{}/{}", directory, name));
    return inside && std::ranges::all_of(*inside, os::is_temporary_name);  // does not show whose it is
  });
  if (names->empty()) return {};
  const std::string advice = advice_for(directory);
  const std::size_t more = names->size() - std::min(names->size(), kShown);
  names->resize(names->size() - more);
  return std::unexpected(Error{
      .kind = ErrorKind::system,
      .code = ENOTEMPTY,
      .message = fmt::format("{} is not a directory of checkpoints, and it is not empty: it holds {}{}; {}",
                             directory, fmt::join(*names, ", "),
                             more > 0 ? fmt::format(" and {} more", more) : std::string(), advice),
      .path = directory});
}

}  // namespace trunkline::checkpoint
