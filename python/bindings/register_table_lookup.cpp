#include <algorithm>

#include "bindings.h"
#include "buffer_view.h"
#include "errors.h"
#include "gil.h"
#include "stream/table_lookup.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

std::span<std::byte> bytes_of(const BufferView& view) {
  return {view.memory().data, static_cast<std::size_t>(view.memory().bytes)};
}

void look_up_values(nb::handle codes, std::size_t columns, nb::handle tables_of_blocks,
                    std::size_t block_rows, std::size_t block_columns, nb::handle tables, std::size_t values,
                    nb::handle out, bool transposed, std::size_t threads) {
  const BufferView codes_view(codes, Access::read_only, "codes");
  const BufferView blocks_view(tables_of_blocks, Access::read_only, "tables_of_blocks");
  const BufferView tables_view(tables, Access::read_only, "tables");
  const BufferView out_view(out, Access::writable, "out");
  const auto blocks = bytes_of(blocks_view);
  if (blocks.size() % sizeof(std::int32_t) != 0 ||
      reinterpret_cast<std::uintptr_t>(blocks.data()) % alignof(std::int32_t) != 0)
    raise_value_error("tables_of_blocks: must be of int32");
  const std::size_t count = bytes_of(codes_view).size();
  const std::size_t entry_bytes = count == 0 ? 0 : bytes_of(out_view).size() / count;
  const TableLookup lookup{.codes = bytes_of(codes_view),
                           .rows = columns == 0 ? 0 : count / columns,
                           .columns = columns,
                           .tables_of_blocks = {reinterpret_cast<const std::int32_t*>(blocks.data()),
                                                blocks.size() / sizeof(std::int32_t)},
                           .block_rows = block_rows,
                           .block_columns = block_columns,
                           .tables = bytes_of(tables_view),
                           .values = values,
                           .value_bytes = entry_bytes / std::max<std::size_t>(1, values),
                           .out = bytes_of(out_view),
                           .transposed = transposed};
  const Status done = [&] {
    const GilReleased unlocked;
    return look_up(lookup, threads);
  }();
  unwrap(done);
}

}  // namespace

void register_table_lookup(nb::module_& module) {
  module.def(
      "look_up", &look_up_values, "codes"_a, nb::kw_only(), "columns"_a, "tables_of_blocks"_a, "block_rows"_a,
      "block_columns"_a, "tables"_a, "values"_a, "out"_a, "transposed"_a = false, "threads"_a = 1,
      nb::sig("def look_up(codes: object, *, columns: int, tables_of_blocks: object, block_rows: int, "
              "block_columns: int, tables: object, values: int, out: object, transposed: bool = False, "
              "threads: int = 1) -> None"),
      "Replaces each byte of a matrix of `columns` by the values, 1 or 2 of 2 or 4 bytes each, that its "
      "block's\ntable of 256 entries has for it.\n\n"
      "tables_of_blocks: int32, which of the tables each block of block_rows x block_columns bytes has. "
      "out:\n"
      "filled with a row of values for each row, or, transposed, with a column for each. Thread-safe, and\n"
      "without the GIL. Raises ValueError for sizes that do not fit together, and tables that do not exist.");
}

}  // namespace trunkline::python
