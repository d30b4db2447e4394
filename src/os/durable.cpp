#include "os/durable.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/trace.h"
#include "os/replacement_file.h"
#include "os/temporary_file.h"
#include "os/unique_fd.h"

namespace trunkline::os {
namespace {

constexpr trace::Kind kSync{"fsync", trace::Category::checkpoint};

// A directory that may be written and not read (mode 0300) cannot be opened for its fsync: the whole
// filesystem is synced then, through a new file there that has no name.
Status sync_filesystem_of(const std::string& directory) {
  const trace::Span span(kSync, directory);
  const UniqueFd fd(::open(directory.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600));
  if (!fd.valid()) {
    ::sync();  // for want of such files on this filesystem; it reports no errors
  } else if (::syncfs(fd.get()) != 0) {
    return std::unexpected(
        system_error(errno, "sync the filesystem of the directory " + directory, directory));
  }
  return {};
}

// After an I/O error, XFS shuts itself down and drops what it had not written; with nothing left to write,
// fsync of a directory then succeeds (fsync of a file does not). Looking up a name that is not cached does
// fail. `fd`: the directory, or AT_FDCWD.
Status check_is_in_reach(int fd, const std::string& path) {
  const std::string other = temporary_name(path);
  const std::string name = fd == AT_FDCWD ? other : std::filesystem::path(other).filename().string();
  struct stat ignored{};
  if (::fstatat(fd, name.c_str(), &ignored, AT_SYMLINK_NOFOLLOW) != 0 && errno != ENOENT)
    return std::unexpected(system_error(errno, "look into the directory " + path + " after its fsync", path));
  return {};
}

}  // namespace

std::string directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

Result<std::string> write_synced_file(const std::string& path, std::string_view contents,
                                      IfPresent if_present, const std::string& access_of) {
  auto file = ReplacementFile::create(path, if_present, access_of);
  if (!file) return std::unexpected(file.error());
  if (auto written = file->write(contents); !written) return std::unexpected(written.error());
  return file->finish();
}

Status write_file_durably(const std::string& path, std::string_view contents, IfPresent if_present) {
  const auto directory = write_synced_file(path, contents, if_present);
  if (!directory) return std::unexpected(directory.error());
  return fsync_directory(*directory);
}

Status fsync_directory(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() && errno == EACCES && ::faccessat(AT_FDCWD, path.c_str(), W_OK | X_OK, AT_EACCESS) == 0) {
    if (auto synced = sync_filesystem_of(path); !synced) return synced;
    return check_is_in_reach(AT_FDCWD, path);
  }
  if (!fd.valid()) return std::unexpected(system_error(errno, "open the directory " + path, path));
  const trace::Span span(kSync, path);
  if (::fsync(fd.get()) != 0)
    return std::unexpected(system_error(errno, "fsync the directory " + path, path));
  return check_is_in_reach(fd.get(), path);
}

}  // namespace trunkline::os
