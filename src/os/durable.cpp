#include "os/durable.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "base/trace.h"
#include "os/replaced_file.h"
#include "os/same_file.h"
#include "os/temporary_file.h"
#include "os/unique_fd.h"

namespace trunkline::os {
namespace {

constexpr trace::Kind kSync{"fsync", trace::Category::checkpoint};

// A file under a unique name; removed at destruction unless it was renamed to its final name.
class TemporaryFile {
 public:
  static Result<TemporaryFile> create(const std::string& directory, mode_t mode) {
    for (;;) {
      std::string path = temporary_name(directory);
      UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
      if (fd.valid()) {
        auto claim = std::make_unique<WriterClaim>(fd.get());
        if (claim->lost()) continue;
        return TemporaryFile(std::move(path), std::move(fd), std::move(claim));
      }
      if (errno == EEXIST || errno == EINTR) continue;
      return std::unexpected(system_error(errno, "creating a temporary file in " + directory, directory));
    }
  }
  TemporaryFile(TemporaryFile&& other) noexcept
      : path_(std::exchange(other.path_, {})), fd_(std::move(other.fd_)), claim_(std::move(other.claim_)) {}
  TemporaryFile& operator=(TemporaryFile&&) = delete;
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }

  Status write(std::string_view contents) const {
    while (!contents.empty()) {
      const ssize_t put = ::write(fd_.get(), contents.data(), contents.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) {
        return std::unexpected(
            system_error(errno, fmt::format("writing {} bytes to {}", contents.size(), path_), path_));
      }
      contents.remove_prefix(static_cast<std::size_t>(put));
    }
    return {};
  }

  Status sync() const {
    const trace::Span span(kSync, path_);
    if (::fsync(fd_.get()) == 0) return {};
    return std::unexpected(system_error(errno, "fsync of " + path_, path_));
  }

  int fd() const { return fd_.get(); }

  Status rename_to(const std::string& path, IfPresent if_present) {
    if (auto same = check_leads_to(path_, fd_.get()); !same) return same;
    const unsigned flags = if_present == IfPresent::fail ? RENAME_NOREPLACE : 0;
    if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, path.c_str(), flags) == 0) {
      path_.clear();
      // So that the directory can still be opened for its fsync when no other descriptor is available.
      close();
      return {};
    }
    // Like the rename, a link fails when the name exists. The temporary name is then removed at destruction.
    if (flags != 0 && may_lack_rename_flags(errno) && ::link(path_.c_str(), path.c_str()) == 0) {
      close();
      return {};
    }
    return std::unexpected(system_error(errno, fmt::format("renaming {} to {}", path_, path), path));
  }

 private:
  TemporaryFile(std::string path, UniqueFd fd, std::unique_ptr<WriterClaim> claim)
      : path_(std::move(path)), fd_(std::move(fd)), claim_(std::move(claim)) {}

  void close() {
    claim_.reset();
    fd_.reset();
  }

  std::string path_;
  UniqueFd fd_;
  std::unique_ptr<WriterClaim> claim_;  // ends before the descriptor
};

}  // namespace

std::string directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

Result<std::string> write_synced_file(const std::string& path, std::string_view contents,
                                      IfPresent if_present) {
  std::optional<ReplacedFile> replaced;
  if (if_present == IfPresent::replace) {
    auto found = ReplacedFile::find(path, "writing to " + path);
    if (!found) return std::unexpected(found.error());
    replaced = std::move(*found);
  }
  const std::string target = replaced ? replaced->path() : path;
  std::string directory = directory_of(target);
  constexpr mode_t kNewFile = 0666;  // minus the umask, as for any file that a program writes
  // 1. A unique name in the target's directory: rename is atomic only within a filesystem.
  auto file = TemporaryFile::create(directory, replaced ? replaced->create_mode() : kNewFile);
  if (!file) return std::unexpected(file.error());
  // 2. All of the contents, and the attributes of the file that is replaced.
  if (auto written = file->write(contents); !written) return std::unexpected(written.error());
  if (replaced) {
    if (auto copied = replaced->copy_attributes_to(file->fd()); !copied)
      return std::unexpected(copied.error());
  }
  // 3. Sync both to the device before any name leads to them: otherwise a crash could leave an empty file. A
  // failed fsync is not repeated, since the kernel may have dropped the pages that it could not write.
  if (auto synced = file->sync(); !synced) return std::unexpected(synced.error());
  // 4. Rename to the final name, in one step. Permission may have been revoked meanwhile.
  if (replaced) {
    const auto changed = replaced->copy_attributes_to(file->fd());
    if (!changed) return std::unexpected(changed.error());
    if (*changed) {
      if (auto synced = file->sync(); !synced) return std::unexpected(synced.error());
    }
  }
  if (auto renamed = file->rename_to(target, if_present); !renamed) return std::unexpected(renamed.error());
  return directory;
}

Status write_file_durably(const std::string& path, std::string_view contents, IfPresent if_present) {
  const auto directory = write_synced_file(path, contents, if_present);
  if (!directory) return std::unexpected(directory.error());
  // 5. Sync the name to the device.
  return fsync_directory(*directory);
}

Status fsync_directory(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return std::unexpected(system_error(errno, "opening the directory " + path, path));
  const trace::Span span(kSync, path);
  if (::fsync(fd.get()) != 0)
    return std::unexpected(system_error(errno, "fsync of the directory " + path, path));
  // After an I/O error, XFS shuts itself down and drops what it had not written; with nothing left to write,
  // fsync of a directory then succeeds (fsync of a file does not). Looking up a name that is not cached does
  // fail.
  const std::string name = std::filesystem::path(temporary_name(path)).filename().string();
  struct stat ignored{};
  if (::fstatat(fd.get(), name.c_str(), &ignored, AT_SYMLINK_NOFOLLOW) != 0 && errno != ENOENT)
    return std::unexpected(
        system_error(errno, "looking into the directory " + path + " after its fsync", path));
  return {};
}

}  // namespace trunkline::os
