// The ranges of one operation, in the order in which they are read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "trunkline/error.h"
#include "trunkline/memory.h"

namespace trunkline {
class FileCore;
struct FileRanges;
}  // namespace trunkline

namespace trunkline::io {

struct RangeList {
  struct Item {
    FileCore* file = nullptr;
    std::uint64_t offset = 0;  // in the file
    std::uint64_t length = 0;  // not 0
    std::byte* memory = nullptr;
    std::uint64_t index = 0;  // of the caller's range
  };

  // Validates ranges and sorts them by file and offset; empty ones are left out. Fails with invalid_argument.
  static Result<RangeList> create(const FileRanges& ranges, const MemoryView& memory);

  // Counts the read as pending in each file: see FileCore::begin. Fails for all or none.
  Status begin();
  // Ends it in each file, which may be closed and destroyed from then on.
  void end();

  std::vector<Item> items;
  std::vector<std::shared_ptr<FileCore>> files;  // each once, in the order of the caller's; none after end()
  std::size_t file_count = 0;
  std::uint64_t bytes = 0;  // of all items
};

}  // namespace trunkline::io
