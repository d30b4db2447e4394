#include "checkpoint/continuation.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/descriptor_io.h"
#include "checkpoint/manifest.h"
#include "checkpoint/names.h"
#include "checkpoint/own_directory.h"
#include "os/file_type.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kNeitherLoadedNorSaved =
    "this run has neither loaded nor saved: they belong to an earlier run, were moved or copied in, or "
    "another job saves into the directory; call load() to continue from them or move them out again, and let "
    "one job at a time save into a directory";
constexpr std::string_view kNotLoaded =
    "this run did not load. To continue the earlier run, call load() before saving; to start over, use "
    "another directory, or fresh=True, which moves the earlier run into a separate folder and deletes "
    "nothing";

bool knows_any(const std::string& directory, std::span<const StepEntry> entries, const Continuation& known) {
  return std::ranges::any_of(entries, [&](const StepEntry& entry) {
    if (entry.commits.empty()) return false;
    const auto commit = newest_commit(directory, entry);
    return commit && known.knows(*commit);
  });
}

}  // namespace

Result<Commit> newest_commit(const std::string& directory, const StepEntry& entry) {
  const std::uint64_t number = entry.commits.back();
  auto line = read_first_line(directory, entry.step, number);
  if (!line) return std::unexpected(line.error());
  return Commit{.step = entry.step, .number = number, .first_line = std::move(*line)};
}

DirectoryId directory_id_of(const std::string& directory) {
  struct stat status{};
  if (::stat(directory.c_str(), &status) != 0) return {};
  return {status.st_dev, status.st_ino};
}

bool was_replaced(const std::string& directory, std::span<const StepEntry> entries,
                  const Continuation& known) {
  return !known.is_empty() && directory_id_of(directory) != known.directory &&
         !knows_any(directory, entries, known);
}

Result<Position> position_of(const std::string& directory) {
  const auto descriptor = read_store_descriptor(directory);
  if (!descriptor) return std::unexpected(descriptor.error());
  const auto entries = list_steps(directory);
  if (!entries) return std::unexpected(entries.error());
  Position position{.id = id_of(*descriptor), .latest = latest_of(*entries)};
  for (const StepEntry& entry : *entries) {
    if (entry.commits.empty()) continue;
    // A checkpoint that cannot be read cannot have been loaded, so this run must not overwrite it.
    if (auto commit = newest_commit(directory, entry)) position.commits.insert(std::move(*commit));
  }
  return position;
}

Status check_not_of_dcp(const std::string& directory, std::uint64_t step) {
  const std::string path = fmt::format("{}/{}", directory, step_directory(step));
  if (!is_of_dcp(path)) return {};
  return std::unexpected(Error{
      .kind = ErrorKind::system,
      .code = EEXIST,
      .message =
          fmt::format("cannot save step {} into {}: {} there holds a checkpoint of "
                      "torch.distributed.checkpoint; give those of a Checkpointer a directory of their own",
                      step, directory, step_directory(step)),
      .path = path});
}

Status check_not_a_link(const std::string& directory, std::uint64_t step) {
  const std::string path = fmt::format("{}/{}", directory, step_directory(step));
  if (!os::is_symlink(path)) return {};
  std::error_code error;
  return std::unexpected(Error{
      .kind = ErrorKind::system,
      .code = EEXIST,
      .message =
          fmt::format("cannot save step {} into {}: {} is a symbolic link to {}, and the save would write "
                      "there; remove the link (what it leads to stays), or save another step",
                      step, directory, step_directory(step), fs::read_symlink(path, error).string()),
      .path = path});
}

std::uint64_t Continuation::newest_number() const {
  std::uint64_t newest = 0;
  for (const auto* commits : {&loaded.commits, &saved}) {
    for (const Commit& commit : *commits) newest = std::max(newest, commit.number);
  }
  return newest;
}

Status check_continues(const std::string& directory, const std::string& id, std::uint64_t step,
                       std::span<const StepEntry> entries, const Continuation& known,
                       std::uint64_t first_commit) {
  // Where the descriptor was removed (for example by a purge of old files on a scratch disk), a known
  // checkpoint is proof enough: another run would have moved it away.
  const bool is_same = known.loaded.id == id || (id.empty() && knows_any(directory, entries, known));
  const bool started_over = !is_same && !known.is_empty();
  std::vector<std::uint64_t> steps;
  for (const StepEntry& entry : entries) {
    if (entry.commits.empty()) continue;
    if (!started_over && entry.step < step) continue;
    if (!started_over && entry.step > step && entry.commits.back() < first_commit) continue;
    const auto commit = newest_commit(directory, entry);
    // It may have been removed since the listing, as the directory may not be locked. A dangling link does
    // not count as removed.
    std::error_code error;
    const bool was_removed =
        !commit &&
        !fs::exists(fs::symlink_status(manifest_path(directory, entry.step, entry.commits.back()), error)) &&
        !error;
    const bool is_known = is_same && commit && known.knows(*commit);
    if (started_over || !(is_known || was_removed)) steps.push_back(entry.step);
  }
  if (steps.empty()) return {};
  return std::unexpected(Error{
      .kind = ErrorKind::system,
      .code = EEXIST,
      .message = fmt::format("cannot save step {} into {}: it already holds {}, which {}", step, directory,
                             in_words(steps), known.is_empty() ? kNotLoaded : kNeitherLoadedNorSaved),
      .path = directory});
}

}  // namespace trunkline::checkpoint
