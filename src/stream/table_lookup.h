// Replaces bytes by the values that tables have for them: how quantised weights are dequantised. The caller
// makes the tables, and so decides how values are rounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trunkline/error.h"

namespace trunkline {

// Row-major matrices. All tables have 256 entries, each of `values` values of `value_bytes`: those of a byte,
// in the order of the columns.
struct TableLookup {
  std::span<const std::byte> codes;  // rows x columns
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::span<const std::int32_t> tables_of_blocks;  // which table each block of codes has
  std::size_t block_rows = 1;
  std::size_t block_columns = 1;
  std::span<const std::byte> tables;
  std::size_t values = 1;       // of a byte: 1 or 2
  std::size_t value_bytes = 2;  // 2 or 4
  std::span<std::byte> out;     // rows x (columns * values), or (columns * values) x rows
  bool transposed = false;
};

// Fills `out`, with up to `threads` threads. Error (invalid_argument) if sizes do not fit together, if a
// block has a table that does not exist, or if `out` overlaps the others; then it stays as it was.
Status look_up(const TableLookup& lookup, std::size_t threads);

}  // namespace trunkline
