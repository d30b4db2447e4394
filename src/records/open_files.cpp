#include "records/open_files.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "os/signals_blocked.h"
#include "records/file_stamp.h"

namespace trunkline::records {
namespace {

constexpr std::uint64_t kMaxOpen = 1024;
constexpr std::uint64_t kMinOpen = 4;
// A file has two descriptors. Most of a process's descriptors are left to others.
constexpr std::uint64_t kShareOfDescriptors = 8;
// Threads that open files, at most, and for how many files each: starting one takes as long as opening a few
// files whose directories and inodes are in memory.
constexpr std::size_t kMaxThreads = 16;
constexpr std::size_t kFilesPerThread = 8;

std::size_t open_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMinOpen;
  return std::clamp<std::uint64_t>(limit.rlim_cur / kShareOfDescriptors, kMinOpen, kMaxOpen);
}

}  // namespace

OpenFiles::OpenFiles(Engine engine, std::shared_ptr<const SampleTable> table, std::optional<Volume> volume)
    : engine_(std::move(engine)),
      table_(std::move(table)),
      volume_(std::move(volume)),
      capacity_(open_limit()) {}

Result<File> OpenFiles::open(std::uint32_t file) {
  if (const auto known = by_file_.find(file); known != by_file_.end()) {
    entries_.splice(entries_.begin(), entries_, known->second);
    return known->second->second;
  }
  const auto ahead = ahead_.find(file);
  auto opened = ahead != ahead_.end() ? ahead->second : open_now(file);
  if (!opened) return opened;
  if (entries_.size() >= capacity_) {
    by_file_.erase(entries_.back().first);
    entries_.pop_back();
  }
  entries_.emplace_front(file, *opened);
  by_file_[file] = entries_.begin();
  return opened;
}

void OpenFiles::open_ahead(std::span<const std::uint32_t> files) {
  ahead_.clear();
  std::vector<std::uint32_t> missing;
  for (const std::uint32_t file : files) {
    if (!by_file_.contains(file)) missing.push_back(file);
  }
  std::ranges::sort(missing);
  missing.erase(std::ranges::unique(missing).begin(), missing.end());
  const std::size_t threads = std::min(kMaxThreads, missing.size() / kFilesPerThread);
  if (threads < 2) return;  // open() does as well
  std::vector<Result<File>> opened(missing.size());
  std::atomic<std::size_t> next{0};
  const auto open_all = [&] {
    for (std::size_t index = next++; index < missing.size(); index = next++)
      opened[index] = open_now(missing[index]);
  };
  {
    const os::SignalsBlocked blocked;
    std::vector<std::jthread> others;
    bool may_start = true;
    while (may_start && others.size() < threads - 1) {
      try {
        others.emplace_back(open_all);
      } catch (const std::system_error&) {
        may_start = false;  // the process has as many threads as it may
      }
    }
    open_all();
  }
  for (std::size_t index = 0; index < missing.size(); ++index)
    ahead_.emplace(missing[index], std::move(opened[index]));
}

Result<File> OpenFiles::open_now(std::uint32_t file) const {
  const std::string path(table_->path(file));
  auto opened = volume_ ? volume_->open(engine_, path) : File::open(engine_, path);
  if (!opened) return opened;
  if (auto status = check_unchanged(*opened, file); !status) return std::unexpected(status.error());
  return opened;
}

Status OpenFiles::check_unchanged(const File& opened, std::uint32_t file) const {
  const auto changed = [&](std::string_view what) {
    return std::unexpected(make_error(
        ErrorKind::corrupt,
        fmt::format("{} has changed since it was indexed ({}); rebuild the index with trunkline.data.index",
                    opened.path(), what),
        opened.path()));
  };
  const auto stamp = stamp_of(opened);
  if (!stamp) return std::unexpected(stamp.error());
  if (stamp->bytes != table_->sizes[file])
    return changed(fmt::format("it has {} bytes, and had {}", stamp->bytes, table_->sizes[file]));
  if (stamp->inode == 0 || table_->mtimes_ns.empty()) return {};
  if (volume_ && table_->inodes[file] == 0) return {};  // an older index of a volume
  if (table_->mtimes_ns[file] != stamp->mtime_ns) return changed("it was modified");
  if (table_->inodes[file] != stamp->inode) return changed("it was replaced");
  return {};
}

}  // namespace trunkline::records
