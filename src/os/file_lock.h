// A lock that all who open a file share, in this process and in others.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <limits>

namespace trunkline::os {

// Held for its lifetime, on the open file behind a descriptor (open file description locks, fcntl(2)):
// threads that use the same descriptor do not exclude each other. Advisory; where the filesystem has no
// locks, nothing is held.
class FileLock {
 public:
  enum class Kind { shared, exclusive };

  // Waits for the lock. An exclusive one needs a descriptor that is open for writing.
  FileLock(int fd, Kind kind) : fd_(fd) { held_ = apply(kind == Kind::shared ? F_RDLCK : F_WRLCK); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() {
    if (held_) apply(F_UNLCK);
  }

  bool held() const { return held_; }

 private:
  bool apply(short type) const {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    // One byte that no file has, so that locks which users put on ranges of their files are not in the way.
    lock.l_start = std::numeric_limits<off_t>::max() - 1;
    lock.l_len = 1;
    int code = 0;
    do code = ::fcntl(fd_, F_OFD_SETLKW, &lock) == 0 ? 0 : errno;
    while (code == EINTR);
    return code == 0;
  }

  int fd_;
  bool held_ = false;
};

}  // namespace trunkline::os
