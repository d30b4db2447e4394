#include "checkpoint/shard_references.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>

#include "checkpoint/listing.h"
#include "checkpoint/manifest.h"
#include "checkpoint/names.h"
#include "os/read_text.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".safetensors";
constexpr std::size_t kBeginningBytes = kMaxLineBytes + 64;

// Whether the text begins like the manifest of that step, which names shards of that step only.
bool is_of_step(std::string_view text, std::uint64_t step) {
  const std::size_t line = text.find('\n');
  return line != std::string_view::npos &&
         text.substr(line + 1).starts_with(fmt::format(R"({{"step":{},)", step));
}

// What disappeared while it was being read names nothing any more.
bool is_gone(const Error& error) { return error.code == ENOENT || error.code == ENOTDIR; }

class Search {
 public:
  Status folder(const std::string& path, unsigned depth);
  // `step`: that of the directory that contains the file, if saves are made in it.
  Status file(const std::string& path, std::string_view name, std::optional<std::uint64_t> step);

  std::set<std::string> names;
  std::string skipped = {};              // a folder that is not searched
  bool leaves_out_steps_of_root = true;  // whose manifests name shards of the root's own steps

 private:
  Status entry(const std::string& folder, const std::string& name, unsigned depth);
  bool leads_outside(const std::string& link) const;

  std::string root_;  // without symbolic links
};

Status Search::file(const std::string& path, std::string_view name, std::optional<std::uint64_t> step) {
  if (name.find("manifest") == std::string_view::npos) return {};
  if (step && commit_of(name)) {
    const auto beginning = os::read_text(path, kBeginningBytes);
    if (beginning && is_of_step(*beginning, *step)) return {};
  }
  const auto text = os::read_text(path, std::numeric_limits<std::size_t>::max());
  if (text) {
    add_shard_names(*text, names);
  } else if (!is_gone(text.error())) {
    return std::unexpected(text.error());
  }
  return {};
}

bool Search::leads_outside(const std::string& link) const {
  std::error_code error;
  const std::string target = fs::canonical(link, error).string();
  return !error && target != root_ && !target.starts_with(root_ + "/");
}

Status Search::entry(const std::string& folder, const std::string& name, unsigned depth) {
  const std::string path = fmt::format("{}/{}", folder, name);
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) return {};
  const bool is_link = S_ISLNK(status.st_mode);
  if (is_link && ::stat(path.c_str(), &status) != 0) return {};
  if (S_ISDIR(status.st_mode)) {
    const bool follows = path != skipped && (!is_link || (depth == 0 && leads_outside(path)));
    return follows && depth < kMaxFolderDepth ? this->folder(path, depth + 1) : Status{};
  }
  if (!S_ISREG(status.st_mode)) return {};
  // Steps of the directory itself; those in folders belong to copies, or to runs that were set aside.
  const bool is_own = depth == 1 && leaves_out_steps_of_root;
  return file(path, name, is_own ? step_of(fs::path(folder).filename().string()) : std::nullopt);
}

Status Search::folder(const std::string& path, unsigned depth) {
  if (depth == 0) {
    std::error_code error;
    root_ = fs::canonical(path, error).string();
  }
  const auto entries = names_in(path);
  if (!entries) return is_gone(entries.error()) ? Status{} : std::unexpected(entries.error());
  for (const std::string& name : *entries) {
    if (auto searched = entry(path, name, depth); !searched) return searched;
  }
  return {};
}

std::string list_path(const std::string& volume_step) {
  return fmt::format("{}/{}", volume_step, kMovedShardsFile);
}

}  // namespace

void add_shard_names(std::string_view text, std::set<std::string>& names) {
  constexpr std::string_view kPrefix = "shard-";
  for (std::size_t at = text.find(kPrefix); at != std::string_view::npos; at = text.find(kPrefix, at + 1)) {
    const std::size_t end = text.find(kSuffix, at);
    if (end == std::string_view::npos) return;
    const std::string_view name = text.substr(at, end - at + kSuffix.size());
    if (is_shard_file(name)) names.emplace(name);
  }
}

Result<std::set<std::string>> shards_named_below(const std::string& directory) {
  Search search;
  if (auto searched = search.folder(directory, 0); !searched) return std::unexpected(searched.error());
  const fs::path path = directory;
  if (!is_aside_directory(path.filename().string())) return std::move(search.names);
  // Steps of a run that was set aside may have been moved back into the surrounding directory.
  Search around;
  around.skipped = directory;
  around.leaves_out_steps_of_root = false;
  if (auto searched = around.folder(path.parent_path().string(), 0); !searched)
    return std::unexpected(searched.error());
  around.names.merge(search.names);
  return std::move(around.names);
}

Result<std::set<std::string>> shards_named_beside(const std::string& step_directory) {
  Search search;
  const auto entries = names_in(step_directory);
  if (!entries) return std::unexpected(entries.error());
  for (const std::string& name : *entries) {
    if (commit_of(name)) continue;
    const std::string path = fmt::format("{}/{}", step_directory, name);
    struct stat status{};
    if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    if (auto read = search.file(path, name, std::nullopt); !read) return std::unexpected(read.error());
  }
  return std::move(search.names);
}

Result<std::set<std::string>> moved_shards(const std::string& volume_step) {
  std::set<std::string> names;
  const auto text = os::read_text(list_path(volume_step), std::numeric_limits<std::size_t>::max());
  if (text) {
    add_shard_names(*text, names);
  } else if (!is_gone(text.error())) {
    return std::unexpected(text.error());
  }
  return names;
}

Status keep_moved_shards(const std::string& volume_step, const DirectoryOps& ops) {
  const auto files = names_in(volume_step);
  if (!files) return is_gone(files.error()) ? Status{} : std::unexpected(files.error());
  auto listed = moved_shards(volume_step);
  if (!listed) return std::unexpected(listed.error());
  const std::size_t before = listed->size();
  for (const std::string& name : *files) {
    if (is_shard_file(name)) listed->insert(name);
  }
  if (listed->size() == before) return {};
  return ops.replace_file_durably(list_path(volume_step), fmt::format("{}\n", fmt::join(*listed, "\n")));
}

}  // namespace trunkline::checkpoint
