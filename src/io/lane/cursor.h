// How much of a request has been cut into transfers.
#pragma once

#include <cstdint>

#include "io/lane/transfer.h"
#include "trunkline/fault.h"
#include "trunkline/memory.h"

namespace trunkline {
class FileCore;
}

namespace trunkline::io {

struct Cursor {
  Op op = Op::read;
  FileCore* file = nullptr;
  MemoryView memory = {};     // none for a sync
  std::uint64_t offset = 0;   // of the request, in the logical file
  std::uint64_t issued = 0;   // bytes, or members of a sync, that next() has returned
  bool gpu_direct = false;    // the memory's device reads and writes the file directly
  bool gds_required = false;  // ... regardless of earlier failures

  bool exhausted() const;

  // Fills in `transfer` with the next piece and advances; false when there is none left.
  bool next(std::uint64_t block_bytes, Transfer& transfer);
};

}  // namespace trunkline::io
