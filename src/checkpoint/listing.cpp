#include "checkpoint/listing.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "checkpoint/names.h"
#include "os/read_text.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

// It was committed, whatever happened to it since: this is not "no such step".
std::unexpected<Error> lost_manifest(const std::string& path) {
  return std::unexpected(
      make_error(ErrorKind::corrupt,
                 fmt::format("{} is listed but cannot be opened (ENOENT): is it a link to a disk that is not "
                             "mounted? Mount the disk, or use another step",
                             path),
                 path));
}

struct Beginning {
  std::string text;
  std::uint64_t file_bytes = 0;
};

Result<Beginning> read_beginning(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0)
    return std::unexpected(system_error(errno, "stat the manifest " + path, path));
  // Reading a device might never end.
  if (!S_ISREG(status.st_mode))
    return std::unexpected(make_error(
        ErrorKind::corrupt,
        fmt::format("{} has the name of a manifest but is not a regular file; use another step", path),
        path));
  auto text = os::read_text(path, kMaxLineBytes);
  if (!text) return std::unexpected(text.error());
  return Beginning{.text = std::move(*text), .file_bytes = static_cast<std::uint64_t>(status.st_size)};
}

Result<std::string> read_manifest_text(const std::string& path) {
  // Checked before reading all of it: a sparse file can be larger than memory.
  const auto beginning = read_beginning(path);
  if (!beginning) return std::unexpected(beginning.error());
  if (auto line = check_first_line(beginning->text, beginning->file_bytes, path); !line)
    return std::unexpected(line.error());
  return os::read_text(path, beginning->file_bytes);
}

struct StepDirectories {
  std::vector<std::uint64_t> steps = {};  // ascending
  std::map<std::uint64_t, struct stat> status = {};
  std::vector<std::uint64_t> absent = {};  // whose names were listed, but that do not exist
};

Result<StepDirectories> find_step_directories(const std::string& directory) {
  const auto names = names_in(directory);
  if (!names) return std::unexpected(names.error());
  StepDirectories found;
  for (const std::string& name : *names) {
    const auto step = step_of(name);
    if (!step) continue;
    const std::string path = fmt::format("{}/{}", directory, name);
    struct stat status{};
    if (::stat(path.c_str(), &status) == 0) {
      if (!S_ISDIR(status.st_mode)) continue;
      found.steps.push_back(*step);
      found.status.emplace(*step, status);
    } else if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) {
      found.absent.push_back(*step);
    } else {
      // If it were left out, it would count as a step that was never saved.
      return std::unexpected(system_error(errno, "stat the step " + path, path));
    }
  }
  std::ranges::sort(found.steps);
  return found;
}

struct Listing {
  std::vector<StepEntry> entries = {};
  std::vector<std::uint64_t> absent = {};  // as in StepDirectories
  bool has_empty = false;                  // steps without a commit
  bool operator==(const Listing&) const = default;
};

// The commits of a step, from the cache if that has them. A folder on another filesystem than the directory
// is a link, or a mount, to where the times may be out of date.
Result<std::vector<std::uint64_t>> commits_of(const std::string& directory, std::uint64_t step,
                                              const struct stat& folder, std::optional<dev_t> device,
                                              ListingCache* cache) {
  if (cache == nullptr || folder.st_dev != device) return commits_in(directory, step);
  if (const auto* known = cache->find(step, folder)) return *known;
  auto commits = commits_in(directory, step);
  if (commits) cache->add(step, folder, *commits);
  return commits;
}

// `cache`: nullptr without one.
Result<Listing> list_once(const std::string& directory, ListingCache* cache) {
  struct stat own{};
  std::optional<dev_t> device;
  if (cache != nullptr && ::stat(directory.c_str(), &own) == 0) device = own.st_dev;
  auto found = find_step_directories(directory);
  if (!found) return std::unexpected(found.error());
  if (cache != nullptr) cache->retain(found->steps);
  Listing listing{.absent = std::move(found->absent)};
  for (const std::uint64_t step : found->steps) {
    auto commits = commits_of(directory, step, found->status.at(step), device, cache);
    if (!commits) return std::unexpected(commits.error());
    listing.has_empty |= commits->empty();
    listing.entries.push_back({.step = step, .commits = std::move(*commits)});
  }
  return listing;
}

// Another process may save meanwhile. Where a step lacks its commits, they may have been removed since the
// directory was listed, and what was committed before that came too late for the listing: a directory that
// always had a checkpoint would seem to have none. Two equal listings in a row show the actual contents.
Result<std::vector<StepEntry>> list_with(const std::string& directory, ListingCache* cache) {
  auto listing = list_once(directory, cache);
  while (listing && (listing->has_empty || !listing->absent.empty())) {
    auto again = list_once(directory, cache);
    if (!again || *again == *listing) {
      listing = std::move(again);
      break;
    }
    listing = std::move(again);
  }
  if (!listing) return std::unexpected(listing.error());
  return std::move(listing->entries);
}

std::uint64_t newest_commit_of(std::span<const StepEntry> entries) {
  std::uint64_t newest = 0;
  for (const StepEntry& entry : entries) {
    if (!entry.commits.empty()) newest = std::max(newest, entry.commits.back());
  }
  return newest;
}

}  // namespace

std::unexpected<Error> no_checkpoint_of(const std::string& directory, std::uint64_t step) {
  return std::unexpected(Error{.kind = ErrorKind::system,
                               .code = ENOENT,
                               .message = fmt::format("{} has no checkpoint of step {}; {}", directory, step,
                                                      steps_in_words(directory)),
                               .path = directory});
}

Result<std::vector<std::string>> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entries(directory, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error))
    names.push_back(entries->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory)
    return std::unexpected(system_error(error.value(), "list the directory " + directory, directory));
  std::ranges::sort(names);
  return names;
}

Result<std::vector<std::uint64_t>> step_directories_in(const std::string& directory) {
  auto found = find_step_directories(directory);
  if (!found) return std::unexpected(found.error());
  return std::move(found->steps);
}

Result<std::vector<std::uint64_t>> commits_in(const std::string& directory, std::uint64_t step) {
  const auto names = names_in(directory + "/" + step_directory(step));
  if (!names) return std::unexpected(names.error());
  std::vector<std::uint64_t> commits;
  for (const std::string& name : *names) {
    if (const auto commit = commit_of(name)) commits.push_back(*commit);
  }
  std::ranges::sort(commits);
  return commits;
}

Result<std::vector<StepEntry>> list_steps(const std::string& directory) {
  return list_with(directory, nullptr);
}

Result<std::vector<StepEntry>> list_steps(const std::string& directory, ListingCache& cache) {
  return list_with(directory, &cache);
}

std::uint64_t next_commit(const std::string& directory, std::span<const StepEntry> entries,
                          std::uint64_t first) {
  std::uint64_t newest = std::max(first - 1, newest_commit_of(entries));
  if (newest_commit_of(entries) > 0) return newest + 1;
  const auto names = names_in(directory);
  if (!names) return newest + 1;
  for (const std::string& name : *names) {
    if (!is_aside_directory(name)) continue;
    if (const auto aside = list_steps(fmt::format("{}/{}", directory, name)))
      newest = std::max(newest, newest_commit_of(*aside));
  }
  return newest + 1;
}

std::optional<std::uint64_t> latest_of(std::span<const StepEntry> entries) {
  const StepEntry* last = nullptr;
  for (const StepEntry& entry : entries) {
    if (entry.commits.empty()) continue;
    if (last == nullptr || entry.commits.back() > last->commits.back()) last = &entry;
  }
  return last == nullptr ? std::nullopt : std::optional(last->step);
}

std::string in_words(std::span<const std::uint64_t> steps) {
  constexpr std::size_t kEnds = 3;
  const std::string_view noun = steps.size() == 1 ? "step" : "steps";
  if (steps.size() <= 2 * kEnds) return fmt::format("{} {}", noun, fmt::join(steps, ", "));
  return fmt::format("{} {}, ..., {}", noun, fmt::join(steps.first(kEnds), ", "),
                     fmt::join(steps.last(kEnds), ", "));
}

std::string steps_in_words(const std::string& directory) {
  std::vector<std::uint64_t> steps;
  const auto entries = list_steps(directory);
  if (!entries) return "its steps cannot be listed: " + entries.error().message;
  for (const StepEntry& entry : *entries) {
    if (!entry.commits.empty()) steps.push_back(entry.step);
  }
  struct stat status{};
  if (steps.empty() && ::stat(directory.c_str(), &status) != 0 && errno == ENOENT)
    return "the directory does not exist (is its path mistyped?)";
  if (steps.empty()) return "there are no steps in it";
  return "it has " + in_words(steps);
}

std::string manifest_path(const std::string& directory, std::uint64_t step, std::uint64_t commit) {
  return fmt::format("{}/{}/{}", directory, step_directory(step), manifest_file(commit));
}

std::string volume_step_directory(const std::string& directory, const std::string& volume,
                                  std::uint64_t step) {
  return fmt::format("{}/{}", volume == kOwnVolume ? directory : volume, step_directory(step));
}

std::string shard_path(const std::string& directory, const Manifest& manifest, std::size_t shard) {
  const Shard& found = manifest.shards.at(shard);
  return volume_step_directory(directory, manifest.volumes.at(found.volume), manifest.step) + "/" +
         found.file;
}

Result<Manifest> read_manifest_of(const std::string& directory, std::uint64_t step, std::uint64_t commit) {
  const std::string path = manifest_path(directory, step, commit);
  const auto text = read_manifest_text(path);
  if (!text) return std::unexpected(text.error());
  auto manifest = parse_manifest(*text, path);
  if (manifest && (manifest->step != step || manifest->commit != commit)) {
    return std::unexpected(
        make_error(ErrorKind::corrupt,
                   fmt::format("{} is the manifest of commit {} of step {}: it was moved or copied there; "
                               "use another step, or move it back to its own name",
                               path, manifest->commit, manifest->step),
                   path));
  }
  return manifest;
}

Result<Manifest> read_newest_manifest(const std::string& directory, std::uint64_t step) {
  std::optional<std::uint64_t> last;
  while (true) {
    const auto commits = commits_in(directory, step);
    if (!commits) return std::unexpected(commits.error());
    if (commits->empty()) return no_checkpoint_of(directory, step);
    auto manifest = read_manifest_of(directory, step, commits->back());
    // A save of the same step may have replaced it since the listing. Commit numbers only grow, so this
    // terminates.
    if (manifest || manifest.error().code != ENOENT) return manifest;
    if (last == commits->back()) return lost_manifest(manifest_path(directory, step, *last));
    last = commits->back();
  }
}

Result<std::string> read_first_line(const std::string& directory, std::uint64_t step, std::uint64_t commit) {
  auto beginning = read_beginning(manifest_path(directory, step, commit));
  if (!beginning) return std::unexpected(beginning.error());
  return std::string(first_line(beginning->text));
}

Status check_manifest(const std::string& directory, std::uint64_t step, std::uint64_t commit) {
  const std::string path = manifest_path(directory, step, commit);
  const auto text = read_manifest_text(path);
  if (!text) return std::unexpected(text.error());
  const auto json = unframe_manifest(*text, path);
  if (!json) return std::unexpected(json.error());
  return {};
}

}  // namespace trunkline::checkpoint
