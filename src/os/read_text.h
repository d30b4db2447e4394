// Reads small text files, including those of /proc and /sys.
#pragma once

#include <cstddef>
#include <string>

#include "trunkline/error.h"

namespace trunkline::os {

// The first `max_bytes` of a file (all of it when it is shorter). Works on files of /proc, whose size is not
// known before they are read, and never blocks on a pipe.
Result<std::string> read_text(const std::string& path, std::size_t max_bytes = std::size_t{16} << 20);

}  // namespace trunkline::os
