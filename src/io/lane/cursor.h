// How much of a request has been cut into transfers.
#pragma once

#include <cstdint>

#include "io/lane/range_list.h"
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
  MemoryView memory = {};    // none for a sync
  std::uint64_t offset = 0;  // of the request, in the logical file
  std::uint64_t issued =
      0;  // bytes, or members of a sync, that next() has returned; of ranges, bytes of the next
  const RangeList* ranges = nullptr;  // in place of file and offset
  std::size_t next_range = 0;         // its index in ranges->items
  bool gpu_direct = false;            // the memory's device reads and writes the file directly
  bool gds_required = false;          // ... regardless of earlier failures

  bool exhausted() const;

  // Fills in `transfer` with the next piece and advances; false when there is none left.
  bool next(std::uint64_t block_bytes, Transfer& transfer);

  // Fills in `transfer` with the next piece of one range, of which `done` bytes are planned already: for
  // those that a transfer of several ranges could not read.
  void plan_alone(const RangeList::Item& item, std::uint64_t done, std::uint64_t block_bytes,
                  Transfer& transfer) const;

 private:
  bool next_of_ranges(std::uint64_t block_bytes, Transfer& transfer);
  void plan(FileCore& of_file, std::byte* data, std::uint64_t from, std::uint64_t length,
            std::uint64_t block_bytes, Transfer& transfer) const;
  std::size_t extend_group(std::uint64_t block_bytes, Transfer& transfer) const;
};

}  // namespace trunkline::io
