// Filesystems that only this kernel writes to.
#pragma once

#include <cstdint>
#include <string>

namespace trunkline::os {

// False where another machine, or a user-space program (FUSE), backs the filesystem, and where that is not
// known. `type`: f_type of statfs(2).
bool is_local_filesystem(std::uint32_t type);
bool is_on_local_filesystem(int fd);
bool is_on_local_filesystem(const std::string& path);

}  // namespace trunkline::os
