// The files of an engine with the memory backend: an anonymous file (memfd_create(2)) for each path.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <string>

#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::io {

// Thread-safe.
class MemoryFiles {
 public:
  // Like open(2) with these flags (O_CREAT, O_EXCL, O_TRUNC are honoured): returns a descriptor of the path's
  // file.
  Result<os::UniqueFd> open(const std::string& path, int flags) {
    const std::scoped_lock lock(mutex_);
    auto found = files_.find(path);
    const std::string action = "open " + path + " in memory";
    if (found == files_.end()) {
      if ((flags & O_CREAT) == 0) return std::unexpected(system_error(ENOENT, action, path));
      os::UniqueFd created(::memfd_create("trunkline", MFD_CLOEXEC));
      if (!created.valid()) return std::unexpected(system_error(errno, action, path));
      found = files_.emplace(path, std::move(created)).first;
    } else if ((flags & O_EXCL) != 0) {
      return std::unexpected(system_error(EEXIST, action, path));
    }
    if ((flags & O_TRUNC) != 0 && ::ftruncate(found->second.get(), 0) != 0)
      return std::unexpected(system_error(errno, action, path));
    os::UniqueFd copy(::fcntl(found->second.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return std::unexpected(system_error(errno, action, path));
    return copy;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, os::UniqueFd> files_;
};

}  // namespace trunkline::io
