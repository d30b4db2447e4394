#include "stream/file_versions.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "io/file/file_core.h"

namespace trunkline {

namespace {

// Sizes and times of a file's members.
Result<std::string> state_of(const File& file) {
  std::string state;
  for (const io::Member& member : file.core()->members) {
    struct stat status{};
    if (::fstat(member.pair.buffered.get(), &status) != 0)
      return std::unexpected(system_error(errno, "stat " + member.path, member.path));
    // Unlike the modification time, the inode's change time cannot be set back.
    fmt::format_to(std::back_inserter(state), "{} {}.{} {}.{};", status.st_size, status.st_mtim.tv_sec,
                   status.st_mtim.tv_nsec, status.st_ctim.tv_sec, status.st_ctim.tv_nsec);
  }
  return state;
}

}  // namespace

FileVersions::FileVersions(std::vector<File> files) : files_(std::move(files)), known_(files_.size()) {}

Status FileVersions::begin() {
  const std::scoped_lock lock(mutex_);
  for (std::size_t file = 0; file < files_.size(); ++file) {
    auto state = state_of(files_[file]);
    if (!state) return std::unexpected(state.error());
    known_[file] = std::move(*state);
  }
  return {};
}

Result<std::uint64_t> FileVersions::version_of(std::size_t file) {
  auto state = state_of(files_[file]);
  if (!state) return std::unexpected(state.error());
  const std::scoped_lock lock(mutex_);
  if (known_[file] != *state) {
    known_[file] = std::move(*state);
    ++modifications_;
  }
  return modifications_;
}

}  // namespace trunkline
