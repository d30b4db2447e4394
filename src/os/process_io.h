// What this process has read, as the kernel counts it.
#pragma once

#include <cstdint>
#include <optional>

namespace trunkline::os {

// Bytes that read(2) and its kin have returned to this process, all threads together; not those of io_uring,
// of mappings, nor of DMA that a driver does elsewhere. nullopt where /proc does not tell.
std::optional<std::uint64_t> bytes_read_by_calls();

}  // namespace trunkline::os
