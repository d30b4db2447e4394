#include "checkpoint/own_directory.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/listing.h"
#include "checkpoint/manifest.h"
#include "checkpoint/names.h"
#include "os/read_text.h"
#include "os/temporary_file.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 3> kDcpFiles{"dcp.manifest", "dcp-rank00000.manifest", ".metadata"};

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

// What a single step is to be called, from its manifest.
std::optional<std::uint64_t> step_in(const std::string& directory, std::span<const std::string> names) {
  for (const std::string& name : names) {
    if (!commit_of(name)) continue;
    const std::string path = fmt::format("{}/{}", directory, name);
    const auto text = os::read_text(path);
    const auto manifest = text ? parse_manifest(*text, path) : std::unexpected(text.error());
    if (manifest) return manifest->step;
  }
  return std::nullopt;
}

}  // namespace

bool is_of_dcp(const std::string& directory) {
  return std::ranges::any_of(kDcpFiles, [&](std::string_view name) {
    std::error_code error;
    return fs::exists(fs::symlink_status(fmt::format("{}/{}", directory, name), error));
  });
}

bool is_foreign_step(const std::string& step_directory) {
  const auto names = names_in(step_directory);
  return names && !names->empty() && std::ranges::none_of(*names, [](const std::string& name) {
           return commit_of(name) || is_shard_file(name) || os::is_temporary_name(name);
         });
}

std::string advice_for(const std::string& directory) {
  const fs::path path(directory);
  const std::vector<std::string> names = names_in(directory).value_or(std::vector<std::string>{});
  const bool is_step =
      std::ranges::any_of(names, [](const auto& name) { return commit_of(name).has_value(); });
  const auto called = step_of(path.filename().string());
  const auto step = is_step && !called ? step_in(directory, names) : called;
  if (is_step && called)
    return fmt::format("it is step {} of {}; open that directory", *called, path.parent_path().string());
  if (is_step && step) {
    return fmt::format("it is a copy of step {}; put it into a directory of its own, as {}, and open that",
                       *step, step_directory(*step));
  }
  if (is_step) {
    return fmt::format("it is a single step; open the directory that holds it, in which a step is called {}",
                       step_directory(1));
  }
  if (is_of_dcp(directory))
    return "it is a checkpoint of torch.distributed.checkpoint; load it with trunkline.dcp.StorageReader";
  for (const std::string& name : names) {
    if (step_of(name) && is_of_dcp(fmt::format("{}/{}", directory, name))) {
      return fmt::format(
          "its {} is a checkpoint of torch.distributed.checkpoint; load that with "
          "trunkline.dcp.StorageReader, and give those of a Checkpointer a directory of their own",
          name);
    }
  }
  if (has_checkpoints(fmt::format("{}/checkpoints", directory)).value_or(false))
    return fmt::format("open {}/checkpoints, which is one", directory);
  return fmt::format("give checkpoints a directory of their own, for example {}/checkpoints", directory);
}

Result<std::optional<std::uint64_t>> device_of_directory(const std::string& directory) {
  struct stat status{};
  if (::stat(directory.c_str(), &status) == 0) {
    if (!S_ISDIR(status.st_mode))
      return not_a_directory(directory, "it is a file; name a directory of checkpoints");
    return status.st_dev;
  }
  if (errno == ENOTDIR)
    return not_a_directory(directory, "a part of the path is a file; check the spelling of the path");
  if (errno != ENOENT)
    return std::unexpected(
        system_error(errno, "looking for the directory of checkpoints " + directory, directory));
  if (::lstat(directory.c_str(), &status) != 0) return std::nullopt;
  // Another process may have made it since.
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

Result<bool> has_checkpoints(const std::string& directory) {
  struct stat status{};
  if (::stat(fmt::format("{}/{}", directory, kDescriptorFile).c_str(), &status) == 0) return true;
  const auto steps = step_directories_in(directory);
  if (!steps) return std::unexpected(steps.error());
  return std::ranges::any_of(*steps, [&](std::uint64_t step) {
    return !is_foreign_step(fmt::format("{}/{}", directory, step_directory(step)));
  });
}

Status check_not_foreign(const std::string& directory) {
  constexpr std::size_t kShown = 3;
  const auto ours = has_checkpoints(directory);
  if (!ours) return std::unexpected(ours.error());
  if (*ours) return {};
  auto names = names_in(directory);
  if (!names) return std::unexpected(names.error());
  // Another process may have made it ours since.
  const auto is_ours = [&](const std::string& name) {
    return name == kDescriptorFile ||
           (step_of(name) && !is_foreign_step(fmt::format("{}/{}", directory, name)));
  };
  if (std::ranges::any_of(*names, is_ours)) return {};
  std::erase_if(*names, [](const std::string& name) { return !counts_as_foreign(name); });
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
