// Limits how many more files the process can open, whatever it already holds open or inherited.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <stdexcept>
#include <vector>

namespace trunkline::test {

class FewDescriptors {
 public:
  explicit FewDescriptors(std::size_t left) {
    // Occupies every number up to the limit, so that none is free between those already in use.
    constexpr rlim_t kLimit = 200;
    if (::getrlimit(RLIMIT_NOFILE, &before_) != 0) throw std::runtime_error("getrlimit");
    const struct rlimit low{kLimit, before_.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &low) != 0) throw std::runtime_error("setrlimit");
    for (int fd = ::dup(STDERR_FILENO); fd >= 0; fd = ::dup(STDERR_FILENO)) taken_.push_back(fd);
    if (taken_.size() < left) throw std::runtime_error("too many files are open");
    for (; left > 0; --left) {
      ::close(taken_.back());
      taken_.pop_back();
    }
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() {
    for (const int fd : taken_) ::close(fd);
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }

 private:
  struct rlimit before_{};
  std::vector<int> taken_;
};

}  // namespace trunkline::test
