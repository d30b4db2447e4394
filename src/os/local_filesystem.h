// Filesystems that this kernel alone writes to.
#pragma once

#include <cstdint>
#include <string>

namespace trunkline::os {

// False where another machine, or a program in user space (FUSE), answers for the filesystem, and where that
// is not known. `type`: f_type of statfs(2).
bool is_local_filesystem(std::uint32_t type);
bool is_on_local_filesystem(int fd);
bool is_on_local_filesystem(const std::string& path);

}  // namespace trunkline::os
