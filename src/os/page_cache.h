// What of a file the kernel's page cache holds.
#pragma once

#include <cstdint>
#include <optional>

namespace trunkline::os {

// Bytes of the file, in whole pages, that reading would not have to wait for. nullopt where the kernel does
// not tell: before Linux 6.5, in some sandboxes, and of files that this process may not write. Of filesystems
// that keep their data elsewhere, as overlayfs, it says 0.
std::optional<std::uint64_t> cached_bytes(int fd);

}  // namespace trunkline::os
