#include "checkpoint/held_directories.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "os/same_file.h"

namespace trunkline::checkpoint {

Status HeldDirectories::hold(const std::string& path) {
  if (std::ranges::find(directories_, path, &Directory::path) != directories_.end()) return {};
  os::UniqueFd fd(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return std::unexpected(system_error(errno, "open the directory " + path, path));
  directories_.push_back({.path = path, .fd = std::move(fd)});
  return {};
}

Status HeldDirectories::check() const {
  for (const Directory& directory : directories_) {
    if (auto same = os::check_leads_to(directory.path, directory.fd.get()); !same) return same;
  }
  return {};
}

}  // namespace trunkline::checkpoint
