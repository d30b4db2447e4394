#include "os/fork_private_fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "os/unique_fd.h"

namespace trunkline::os {

// All that are open. A fork waits for the lock, so that no descriptor is open without being listed.
struct ForkPrivateList {
  static inline std::mutex mutex;
  static inline ForkPrivateFd* first = nullptr;

  static void prepare() { mutex.lock(); }
  static void in_parent() { mutex.unlock(); }
  static void in_child() {
    for (ForkPrivateFd* each = first; each != nullptr; each = each->next_) {
      ::close(each->fd_);
      each->fd_ = -1;
    }
    mutex.unlock();
  }
};

ForkPrivateFd::ForkPrivateFd(const std::string& path, int flags, mode_t mode) {
  using List = ForkPrivateList;
  static const int registered = pthread_atfork(List::prepare, List::in_parent, List::in_child);
  (void)registered;
  const std::scoped_lock lock(List::mutex);
  fd_ = above_standard_streams(::open(path.c_str(), flags | O_CLOEXEC, mode));
  if (fd_ < 0) {
    open_error_ = errno;
    return;
  }
  next_ = List::first;
  if (next_ != nullptr) next_->previous_ = this;
  List::first = this;
}

ForkPrivateFd::~ForkPrivateFd() {
  using List = ForkPrivateList;
  if (open_error_ != 0) return;
  const std::scoped_lock lock(List::mutex);
  if (previous_ != nullptr) previous_->next_ = next_;
  if (List::first == this) List::first = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace trunkline::os
