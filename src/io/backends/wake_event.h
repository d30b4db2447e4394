// An eventfd that interrupts another thread's wait in the kernel.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::io {

class WakeEvent {
 public:
  static Result<WakeEvent> create(int flags) {
    WakeEvent event;
    event.fd_.reset(::eventfd(0, EFD_CLOEXEC | flags));
    if (!event.fd_.valid()) return std::unexpected(system_error(errno, "create an eventfd"));
    return event;
  }
  int fd() const { return fd_.get(); }
  void signal() const {
    const std::uint64_t one = 1;
    // Fails only when the counter is full, in which case the waiter wakes up anyway.
    [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof one);
  }

 private:
  os::UniqueFd fd_;
};

}  // namespace trunkline::io
