// An owned file descriptor.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace trunkline::os {

// The same open file under a descriptor above those of the standard streams; -1 (errno) where there is none
// left. A process that was started with closed streams (`2>&-`, a daemon) gets their numbers for files that
// it opens, and whatever prints to a stream would write into the file.
inline int above_standard_streams(int fd) {
  if (fd < STDIN_FILENO || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  ::close(fd);
  errno = error;
  return moved;
}

// Never a standard stream: see above_standard_streams().
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(above_standard_streams(fd)) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    // Linux closes the descriptor even when close() reports EINTR or EIO; fsync has already reported what
    // matters.
    if (fd_ >= 0) ::close(fd_);
    fd_ = above_standard_streams(fd);
  }

 private:
  int fd_ = -1;
};

}  // namespace trunkline::os
