// What tells one version of a file from another.
#pragma once

#include <cstdint>

#include "trunkline/file.h"

namespace trunkline::records {

// Of a file in a volume, over all of its parts: the newest time and the sum of the inodes. All zero where the
// file has no inode (backend memory).
struct FileStamp {
  std::uint64_t bytes = 0;
  std::int64_t mtime_ns = 0;
  std::uint64_t inode = 0;
};

// As it is now; nothing is remembered.
Result<FileStamp> stamp_of(const File& file);

}  // namespace trunkline::records
