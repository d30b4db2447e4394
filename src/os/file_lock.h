// A lock on an open file, shared by everyone who opens the file, in this process and in others.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <limits>

#include "os/fork_generation.h"

namespace trunkline::os {

// Held for its lifetime, on the open file behind a descriptor (open file description locks, fcntl(2)):
// threads that use the same descriptor do not exclude each other. Advisory; where the filesystem does not
// support locks, nothing is held.
class FileLock {
 public:
  enum class Kind { shared, exclusive };

  enum class Wait { until_free, never };

  // An exclusive lock needs a descriptor that is open for writing.
  FileLock(int fd, Kind kind, Wait wait = Wait::until_free) : fd_(fd), generation_(fork_generation()) {
    code_ = apply(kind == Kind::shared ? F_RDLCK : F_WRLCK, wait == Wait::never ? F_OFD_SETLK : F_OFD_SETLKW);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  // A forked child shares the lock with its parent, and must not release it.
  ~FileLock() {
    if (held() && generation_ == fork_generation()) apply(F_UNLCK, F_OFD_SETLK);
  }

  bool held() const { return code_ == 0; }

  // Someone else holds the lock; only possible without waiting.
  bool busy() const { return code_ == EAGAIN || code_ == EACCES; }

 private:
  // 0 or an errno.
  int apply(short type, int command) const {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    // Locks one byte past the end of any file, so as not to conflict with locks that users place on ranges of
    // their files.
    lock.l_start = std::numeric_limits<off_t>::max() - 1;
    lock.l_len = 1;
    int code = 0;
    do code = ::fcntl(fd_, command, &lock) == 0 ? 0 : errno;
    while (code == EINTR);
    return code;
  }

  int fd_;
  unsigned generation_;
  int code_ = 0;
};

}  // namespace trunkline::os
