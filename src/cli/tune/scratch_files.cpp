#include "cli/tune/scratch_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>

#include "base/creation_error.h"
#include "trunkline/units.h"

namespace trunkline::cli {
Result<std::uint64_t> scratch_bytes(std::span<const std::string> directories, std::uint64_t wanted) {
  std::map<dev_t, std::uint64_t> files;  // on each filesystem
  std::uint64_t bytes = wanted;
  for (const std::string& directory : directories) {
    struct stat status{};
    struct statvfs space{};
    if (::stat(directory.c_str(), &status) != 0 || ::statvfs(directory.c_str(), &space) != 0)
      return std::unexpected(missing_directory_error(errno, fmt::format("measure {}", directory), directory));
    if (!S_ISDIR(status.st_mode)) {
      return std::unexpected(make_error(
          ErrorKind::invalid_argument,
          fmt::format(
              "cannot measure {}: it is not a directory; name the directory in which to write a scratch file",
              directory),
          directory));
    }
    const std::uint64_t free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
    const std::uint64_t share = free_bytes / 2 / ++files[status.st_dev] / kMiB * kMiB;
    bytes = std::min(bytes, share);
    if (bytes >= kFewestScratchBytes) continue;
    Error error =
        make_error(ErrorKind::system,
                   fmt::format("cannot measure {}: {} of disk space are free, and a scratch file of at least "
                               "{} may use only half "
                               "of it; free some space, or name another directory",
                               directory, format_bytes(free_bytes), format_size(kFewestScratchBytes)),
                   directory);
    error.code = ENOSPC;
    return std::unexpected(std::move(error));
  }
  return bytes;
}

Result<ScratchFiles> ScratchFiles::create(std::span<const std::string> directories) {
  ScratchFiles files;
  for (const std::string& directory : directories) {
    os::remove_dead_temporary_files(directory);
    std::string path = os::temporary_name(directory);
    os::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!fd.valid())
      return std::unexpected(
          system_error(errno, fmt::format("create a scratch file in {}", directory), directory));
    files.claims_.push_back(std::make_unique<os::WriterClaim>(fd.get()));
    files.fds_.push_back(std::move(fd));
    files.paths_.push_back(std::move(path));
  }
  return files;
}

ScratchFiles::~ScratchFiles() {
  for (const std::string& path : paths_) ::unlink(path.c_str());
}

Status ScratchFiles::drop_page_cache() const {
  for (std::size_t index = 0; index < fds_.size(); ++index) {
    const int fd = fds_[index].get();
    if (::fdatasync(fd) != 0)
      return std::unexpected(system_error(errno, "fsync " + paths_[index], paths_[index]));
    if (const int code = ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); code != 0) {
      return std::unexpected(system_error(code, "drop the page cache of " + paths_[index], paths_[index]));
    }
  }
  return {};
}

}  // namespace trunkline::cli
