// Where a request stands: which of its bytes were cut into transfers already.
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
  std::uint64_t issued = 0;   // bytes, or members of a sync, that next() has passed
  bool gpu_direct = false;    // the memory's device reads and writes the file itself
  bool gds_required = false;  // ... whatever it refused before

  bool exhausted() const;

  // Makes `transfer` the next one and passes it; false when there is none left.
  bool next(std::uint64_t block_bytes, Transfer& transfer);
};

}  // namespace trunkline::io
