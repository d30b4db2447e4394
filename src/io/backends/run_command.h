// Runs one command as one system call, on the calling thread.
#pragma once

#include <cstdint>

#include "io/backends/backend.h"

namespace trunkline::io {

// Bytes moved, or a negative errno value. Does not retry: that is up to the caller.
std::int64_t run_command(const Command& command);

}  // namespace trunkline::io
