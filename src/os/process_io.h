// How much this process has read, as counted by the kernel.
#pragma once

#include <cstdint>
#include <optional>

namespace trunkline::os {

// Bytes that read(2) and similar calls have returned to all threads of this process; excludes io_uring,
// mappings, and DMA that a driver does by itself. nullopt where /proc does not report it.
std::optional<std::uint64_t> bytes_read_by_calls();

}  // namespace trunkline::os
