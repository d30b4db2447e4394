#include "records/open_files.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "io/file/file_core.h"

namespace trunkline::records {
namespace {

constexpr std::uint64_t kMaxOpen = 1024;
constexpr std::uint64_t kMinOpen = 4;
// A file has two descriptors. Most of a process's descriptors are left to others.
constexpr std::uint64_t kShareOfDescriptors = 8;

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
  auto opened = open_now(file);
  if (!opened) return opened;
  if (entries_.size() >= capacity_) {
    by_file_.erase(entries_.back().first);
    entries_.pop_back();
  }
  entries_.emplace_front(file, *opened);
  by_file_[file] = entries_.begin();
  return opened;
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
        fmt::format(
            "{} has changed since it was indexed ({}); make the index again with trunkline.data.index",
            opened.path(), what),
        opened.path()));
  };
  const auto bytes = opened.size();
  if (!bytes) return std::unexpected(bytes.error());
  if (*bytes != table_->sizes[file])
    return changed(fmt::format("it has {} bytes, and had {}", *bytes, table_->sizes[file]));
  const auto& members = opened.core()->members;
  const bool is_on_disk = engine_.config().backend != BackendKind::memory;
  if (volume_ || !is_on_disk || !members.front().pair.buffered.valid()) return {};
  struct stat status{};
  if (::fstat(members.front().pair.buffered.get(), &status) != 0)
    return std::unexpected(system_error(errno, fmt::format("fstat of {}", opened.path()), opened.path()));
  const std::int64_t mtime_ns = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  if (!table_->mtimes_ns.empty() && table_->mtimes_ns[file] != mtime_ns) return changed("it was modified");
  if (!table_->inodes.empty() && table_->inodes[file] != status.st_ino) return changed("it was replaced");
  return {};
}

}  // namespace trunkline::records
