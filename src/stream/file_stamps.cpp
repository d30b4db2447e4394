#include "stream/file_stamps.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "io/file_core.h"

namespace trunkline {

FileStamps::FileStamps(std::vector<File> files) : files_(std::move(files)), stamps_(files_.size()) {}

Result<std::uint64_t> FileStamps::look(std::size_t file) {
  std::string stamp;
  for (const io::Member& member : files_[file].core()->members) {
    struct stat status{};
    if (::fstat(member.pair.buffered.get(), &status) != 0)
      return std::unexpected(system_error(errno, "looking at " + member.path, member.path));
    // The time of the last change of the inode cannot be set back, as that of its contents can.
    fmt::format_to(std::back_inserter(stamp), "{} {}.{} {}.{};", status.st_size, status.st_mtim.tv_sec,
                   status.st_mtim.tv_nsec, status.st_ctim.tv_sec, status.st_ctim.tv_nsec);
  }
  const std::scoped_lock lock(mutex_);
  if (stamps_[file].empty()) {
    stamps_[file] = std::move(stamp);
  } else if (stamps_[file] != stamp) {
    stamps_[file] = std::move(stamp);
    ++modifications_;
  }
  return modifications_;
}

}  // namespace trunkline
