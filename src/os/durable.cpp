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

}  // namespace

std::string directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

Result<std::string> write_synced_file(const std::string& path, std::string_view contents,
                                      IfPresent if_present) {
  auto file = ReplacementFile::create(path, if_present);
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
  if (!fd.valid()) return std::unexpected(system_error(errno, "open the directory " + path, path));
  const trace::Span span(kSync, path);
  if (::fsync(fd.get()) != 0)
    return std::unexpected(system_error(errno, "fsync the directory " + path, path));
  // After an I/O error, XFS shuts itself down and drops what it had not written; with nothing left to write,
  // fsync of a directory then succeeds (fsync of a file does not). Looking up a name that is not cached does
  // fail.
  const std::string name = std::filesystem::path(temporary_name(path)).filename().string();
  struct stat ignored{};
  if (::fstatat(fd.get(), name.c_str(), &ignored, AT_SYMLINK_NOFOLLOW) != 0 && errno != ENOENT)
    return std::unexpected(system_error(errno, "look into the directory " + path + " after its fsync", path));
  return {};
}

}  // namespace trunkline::os
