// How much of a file the kernel's page cache holds.
#pragma once

#include <cstdint>
#include <optional>

namespace trunkline::os {

// Bytes of the file, in whole pages, that can be read without waiting. nullopt where the kernel does not
// report it: before Linux 6.5, in some sandboxes, and for files that this process may not write. 0 on
// filesystems that keep their data elsewhere, such as overlayfs.
std::optional<std::uint64_t> cached_bytes(int fd);

}  // namespace trunkline::os
