#include "stream/file_stamps.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "io/file/file_core.h"

namespace trunkline {

namespace {

// Sizes and times of a file's members.
Result<std::string> stamp_of(const File& file) {
  std::string stamp;
  for (const io::Member& member : file.core()->members) {
    struct stat status{};
    if (::fstat(member.pair.buffered.get(), &status) != 0)
      return std::unexpected(system_error(errno, "looking at " + member.path, member.path));
    // The time of the last change of the inode cannot be set back, as that of its contents can.
    fmt::format_to(std::back_inserter(stamp), "{} {}.{} {}.{};", status.st_size, status.st_mtim.tv_sec,
                   status.st_mtim.tv_nsec, status.st_ctim.tv_sec, status.st_ctim.tv_nsec);
  }
  return stamp;
}

}  // namespace

FileStamps::FileStamps(std::vector<File> files) : files_(std::move(files)), stamps_(files_.size()) {}

Status FileStamps::begin() {
  const std::scoped_lock lock(mutex_);
  for (std::size_t file = 0; file < files_.size(); ++file) {
    auto stamp = stamp_of(files_[file]);
    if (!stamp) return std::unexpected(stamp.error());
    stamps_[file] = std::move(*stamp);
  }
  return {};
}

Result<std::uint64_t> FileStamps::look(std::size_t file) {
  auto stamp = stamp_of(files_[file]);
  if (!stamp) return std::unexpected(stamp.error());
  const std::scoped_lock lock(mutex_);
  if (stamps_[file] != *stamp) {
    stamps_[file] = std::move(*stamp);
    ++modifications_;
  }
  return modifications_;
}

}  // namespace trunkline
