// Allocates a file's blocks before they are written (fallocate(2)).
#pragma once

#include <cstdint>

namespace trunkline::os {

// Allocates the blocks of [offset, offset + bytes). The file grows to offset + bytes if it is shorter,
// possibly even when this fails. Returns 0 or an errno.
int allocate(int fd, std::uint64_t offset, std::uint64_t bytes);

// Like allocate(), but does not change the length of the file when blocks run out. Never shortens the file,
// so others may write to it meanwhile. Fails with ENOSPC, changing nothing, where the free space is known to
// be too small. An allocation that fails later (quota, or others who took the space) may keep the blocks that
// it got, past the end of the file or in its holes.
int allocate_or_keep_length(int fd, std::uint64_t offset, std::uint64_t bytes);

}  // namespace trunkline::os
