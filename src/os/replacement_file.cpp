#include "os/replacement_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/creation_error.h"
#include "base/trace.h"
#include "os/fork_generation.h"
#include "os/same_file.h"

namespace trunkline::os {
namespace {

constexpr trace::Kind kSyncFile{"fsync", trace::Category::checkpoint};
constexpr mode_t kNewFile = 0666;  // minus the umask, as for any file that a program writes

// Whether this error of link(2) may come from a filesystem without hard links.
bool may_lack_links(int code) {
  return code == EPERM || code == ENOSYS || code == EOPNOTSUPP || code == EMLINK;
}

Error unsupported_naming(const std::string& target) {
  return {.kind = ErrorKind::unsupported,
          .code = EOPNOTSUPP,
          .message = fmt::format(
              "cannot create {}: its filesystem can neither rename a file without replacing another one, nor "
              "make hard links, so two processes could replace each other's files; use another filesystem",
              target),
          .path = target};
}

}  // namespace

ReplacementFile::ReplacementFile(std::string target, IfPresent if_present,
                                 std::optional<ReplacedFile> replaced)
    : target_(std::move(target)),
      if_present_(if_present),
      generation_(fork_generation()),
      replaced_(std::move(replaced)) {}

ReplacementFile::ReplacementFile(ReplacementFile&& other) noexcept
    : target_(std::move(other.target_)),
      if_present_(other.if_present_),
      generation_(other.generation_),
      replaced_(std::move(other.replaced_)),
      access_(std::move(other.access_)),
      written_(std::exchange(other.written_, {})),
      fd_(std::move(other.fd_)),
      claim_(std::move(other.claim_)) {}

ReplacementFile::~ReplacementFile() {
  if (!written_.empty() && generation_ == fork_generation()) ::unlink(written_.c_str());
}

Result<ReplacementFile> ReplacementFile::create(const std::string& path, IfPresent if_present,
                                                const std::string& access_of) {
  std::optional<ReplacedFile> replaced;
  if (if_present == IfPresent::replace) {
    auto found = ReplacedFile::find(path, "write to " + path);
    if (!found) return std::unexpected(found.error());
    replaced = std::move(*found);
  }
  std::string target = replaced ? replaced->path() : path;
  ReplacementFile file(std::move(target), if_present, std::move(replaced));
  if (!file.replaced_ && !access_of.empty()) file.access_ = FileAccess::of(access_of);
  if (auto created = file.create_temporary(); !created) return std::unexpected(created.error());
  return file;
}

// In the target's directory: rename is atomic only within a filesystem.
Status ReplacementFile::create_temporary() {
  const std::string directory = directory_of(target_);
  const mode_t mode = replaced_ ? replaced_->create_mode() : access_ ? FileAccess::kCreateMode : kNewFile;
  for (;;) {
    std::string path = temporary_name(directory);
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
    if (fd.valid()) {
      auto claim = std::make_unique<WriterClaim>(fd.get());
      if (claim->lost()) continue;
      written_ = std::move(path);
      fd_ = std::move(fd);
      claim_ = std::move(claim);
      return {};
    }
    if (errno == EEXIST || errno == EINTR) continue;
    return std::unexpected(
        creation_error(errno, "create a temporary file in " + directory, directory, directory));
  }
}

Status ReplacementFile::write(std::string_view contents) const {
  while (!contents.empty()) {
    const ssize_t put = ::write(fd_.get(), contents.data(), contents.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      return std::unexpected(
          system_error(errno, fmt::format("write {} bytes to {}", contents.size(), written_), written_));
    }
    contents.remove_prefix(static_cast<std::size_t>(put));
  }
  return {};
}

Status ReplacementFile::sync() const {
  const trace::Span span(kSyncFile, written_);
  if (::fsync(fd_.get()) == 0) return {};
  return std::unexpected(system_error(errno, "fsync " + written_, written_));
}

Result<std::string> ReplacementFile::finish() {
  // 1. The attributes of the file that is replaced, or of the one whose place it takes.
  if (replaced_) {
    if (auto copied = replaced_->copy_attributes_to(fd()); !copied) return std::unexpected(copied.error());
  }
  if (access_) access_->give_to(fd());
  // 2. Sync contents and attributes to the device before any name leads to them: otherwise a crash could
  // leave an empty file. A failed fsync is not repeated, since the kernel may have dropped the pages that it
  // could not write.
  if (auto synced = sync(); !synced) return std::unexpected(synced.error());
  // 3. The attributes once more: permission may have been revoked meanwhile.
  if (replaced_) {
    const auto changed = replaced_->copy_attributes_to(fd());
    if (!changed) return std::unexpected(changed.error());
    if (*changed) {
      if (auto synced = sync(); !synced) return std::unexpected(synced.error());
    }
  }
  // 4. Rename to the final name, in one step.
  if (auto named = name(); !named) return std::unexpected(named.error());
  return directory_of(target_);
}

Status ReplacementFile::name() {
  if (auto same = check_leads_to(written_, fd()); !same) return same;
  const unsigned flags = if_present_ == IfPresent::fail ? RENAME_NOREPLACE : 0;
  if (::renameat2(AT_FDCWD, written_.c_str(), AT_FDCWD, target_.c_str(), flags) == 0) {
    written_.clear();
    // So that the directory can still be opened for its fsync when no other descriptor is available.
    close();
    return {};
  }
  if (flags != 0 && may_lack_rename_flags(errno)) {
    // Like the rename, a link fails when the name exists. The temporary name is then removed at destruction.
    if (::link(written_.c_str(), target_.c_str()) == 0) {
      close();
      return {};
    }
    if (may_lack_links(errno)) return std::unexpected(unsupported_naming(target_));
  }
  return std::unexpected(system_error(errno, fmt::format("rename {} to {}", written_, target_), target_));
}

void ReplacementFile::close() {
  claim_.reset();
  fd_.reset();
}

}  // namespace trunkline::os
