#include "checkpoint/directory_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <tuple>
#include <utility>

#include "checkpoint/names.h"
#include "os/local_filesystem.h"
#include "os/same_file.h"

namespace trunkline::checkpoint {
namespace {

constexpr mode_t kMode = 0666;  // less the umask

std::unique_ptr<os::FileLock> try_lock(const os::ForkPrivateFd& fd) {
  return std::make_unique<os::FileLock>(fd.get(), os::FileLock::Kind::exclusive, os::FileLock::Wait::never);
}

}  // namespace

std::unexpected<Error> busy_directory(const std::string& directory) {
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = EBUSY,
            .message = fmt::format(
                "{0}: another process, or another Checkpointer of this process, is saving here: EBUSY; wait "
                "until it is done. `lsof {0}/{1}` shows which process; do not remove that file",
                directory, kLockFile),
            .path = directory});
}

DirectoryLock::DirectoryLock(const std::string& directory, int flags)
    : directory_path_(directory),
      directory_(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)),
      path_(fmt::format("{}/{}", directory, kLockFile)),
      fd_(std::make_unique<os::ForkPrivateFd>(path_, flags, kMode)),
      lock_(try_lock(*fd_)) {}

Result<std::unique_ptr<DirectoryLock>> DirectoryLock::acquire(const std::string& directory,
                                                              LockFile lock_file) {
  constexpr int kMostAttempts = 100;
  const bool creates = lock_file == LockFile::create;
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    std::unique_ptr<DirectoryLock> lock(new DirectoryLock(directory, O_RDWR | (creates ? O_CREAT : 0)));
    if (!lock->has_file() && creates) {
      return std::unexpected(
          system_error(lock->fd_->open_error(), "open the lock " + lock->path_, lock->path_));
    }
    if (lock->lock_->busy()) return busy_directory(directory);
    // A file that was removed meanwhile keeps nobody out.
    if (!lock->has_file() || lock->check()) return lock;
  }
  return busy_directory(directory);
}

bool DirectoryLock::excludes_every_writer() const {
  return lock_->held() && os::is_on_local_filesystem(fd_->get());
}

// The directory as well: a copy may have no file of the lock, or the same one (`cp -al`).
Status DirectoryLock::check() const {
  if (directory_.valid()) {
    if (auto same = os::check_leads_to(directory_path_, directory_.get()); !same) return same;
  }
  return has_file() ? os::check_leads_to(path_, fd_->get()) : Status{};
}

Status DirectoryLock::check_or_renew() {
  auto same = check();
  if (same || same.error().code != ENOENT || same.error().path != path_) return same;
  auto renewed = std::make_unique<os::ForkPrivateFd>(path_, O_RDWR | O_CREAT | O_EXCL, kMode);
  if (!renewed->valid()) return same;
  auto taken = try_lock(*renewed);
  if (taken->busy()) return same;
  lock_ = std::move(taken);
  fd_ = std::move(renewed);
  return {};
}

void DirectoryLock::hold_volumes(const StoreDescriptor& descriptor) {
  for (const std::string& volume : descriptor.all_volumes()) std::ignore = volumes_.hold(volume);
}

Status DirectoryLock::check_with_volumes() {
  if (auto same = check_or_renew(); !same) return same;
  return volumes_.check();
}

DirectoryOps DirectoryLock::guarded(const DirectoryOps& ops) {
  return ops.checked_by([this] { return check_with_volumes(); });
}

void DirectoryLock::touch() const { std::ignore = ::futimens(fd_->get(), nullptr); }

}  // namespace trunkline::checkpoint
