// Directories that are kept open, to notice when their paths lead elsewhere.
#pragma once

#include <string>
#include <vector>

#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

class HeldDirectories {
 public:
  // Nothing for a path that is held already.
  Status hold(const std::string& path);

  // Whether each path still leads to the directory that was opened under it.
  Status check() const;

  // The descriptor (O_PATH) of the directory that was held first, whatever its path leads to now; -1: none is
  // held.
  int first() const { return directories_.empty() ? -1 : directories_.front().fd.get(); }

 private:
  struct Directory {
    std::string path;
    os::UniqueFd fd;
  };
  std::vector<Directory> directories_;
};

}  // namespace trunkline::checkpoint
