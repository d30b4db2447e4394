// A file descriptor that forked children do not inherit.
#pragma once

#include <sys/types.h>

#include <string>

namespace trunkline::os {

// For locks: a lock on an open file is held until every process that inherited the descriptor has closed it,
// so workers that outlive their killed parent would keep it. In a forked child the descriptor is closed.
class ForkPrivateFd {
 public:
  // Like open(2), with O_CLOEXEC.
  ForkPrivateFd(const std::string& path, int flags, mode_t mode);
  ForkPrivateFd(const ForkPrivateFd&) = delete;
  ForkPrivateFd& operator=(const ForkPrivateFd&) = delete;
  ~ForkPrivateFd();

  int get() const { return fd_; }  // -1 when opening failed, and in a forked child
  bool valid() const { return fd_ >= 0; }
  int open_error() const { return open_error_; }  // errno of a failed open, else 0

 private:
  friend struct ForkPrivateList;

  int fd_ = -1;
  int open_error_ = 0;
  ForkPrivateFd* next_ = nullptr;
  ForkPrivateFd* previous_ = nullptr;
};

}  // namespace trunkline::os
