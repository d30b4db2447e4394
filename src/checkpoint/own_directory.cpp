#include "checkpoint/own_directory.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/listing.h"
#include "checkpoint/names.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kDcpManifest = "dcp.manifest";

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

// What to do about a directory that is not one of checkpoints, though it has something to do with them.
std::string advice_for(const std::string& directory, std::span<const std::string> names) {
  const fs::path path(directory);
  const bool is_step =
      std::ranges::any_of(names, [](const auto& name) { return commit_of(name).has_value(); });
  if (is_step && step_of(path.filename().string())) {
    return fmt::format("it is step {} of {}; open that directory", *step_of(path.filename().string()),
                       path.parent_path().string());
  }
  if (is_step) {
    return fmt::format("it is a single step; open the directory that holds it, in which a step is called {}",
                       step_directory(1));
  }
  if (std::ranges::find(names, kDcpManifest) != names.end())
    return "it is a checkpoint of trunkline.dcp; load it with trunkline.dcp.StorageReader";
  return fmt::format("give checkpoints a directory of their own, for example {}/checkpoints", directory);
}

}  // namespace

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
  return !steps->empty();
}

Status check_not_foreign(const std::string& directory) {
  constexpr std::size_t kShown = 3;
  const auto ours = has_checkpoints(directory);
  if (!ours) return std::unexpected(ours.error());
  if (*ours) return {};
  auto names = names_in(directory);
  if (!names) return std::unexpected(names.error());
  // Another process may have made it ours since.
  if (std::ranges::any_of(*names, [](const auto& name) { return name == kDescriptorFile || step_of(name); }))
    return {};
  std::erase_if(*names, [](const std::string& name) { return !counts_as_foreign(name); });
  if (names->empty()) return {};
  const std::string advice = advice_for(directory, *names);
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
