#include "stream/table_lookup.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/invalid_argument.h"
#include "base/threads.h"

namespace trunkline {
namespace {

constexpr std::size_t kEntries = 256;
constexpr std::size_t kRowsOfATask = 128;  // of 2 bytes each: four cache lines of a transposed matrix
constexpr std::size_t kColumnsOfATile = 16;
constexpr std::size_t kCodesOfAThread = 1 << 19;  // fewer are not worth starting one

static_assert(std::endian::native == std::endian::little);  // entries are put together as integers

bool overlap(std::span<const std::byte> one, std::span<const std::byte> other) {
  const std::less<> before;
  return !one.empty() && !other.empty() && before(one.data(), other.data() + other.size()) &&
         before(other.data(), one.data() + one.size());
}

Status check(const TableLookup& lookup) {
  const auto fail = [](const char* what) { return invalid_argument(std::string("look_up: ") + what); };
  if (lookup.block_rows == 0 || lookup.block_columns == 0 || lookup.rows % lookup.block_rows != 0 ||
      lookup.columns % lookup.block_columns != 0)
    return fail("rows and columns must be multiples of those of a block");
  if (lookup.values < 1 || lookup.values > 2 || (lookup.value_bytes != 2 && lookup.value_bytes != 4))
    return fail("an entry must be of 1 or 2 values, and each of 2 or 4 bytes");
  const std::size_t entry_bytes = lookup.values * lookup.value_bytes;
  if ((lookup.columns != 0 && lookup.codes.size() / lookup.columns != lookup.rows) ||
      lookup.rows * lookup.columns != lookup.codes.size() ||
      lookup.out.size() / entry_bytes != lookup.codes.size() || lookup.out.size() % entry_bytes != 0)
    return fail("codes must have rows * columns bytes, and out as many entries");
  const std::size_t blocks = lookup.rows / lookup.block_rows * (lookup.columns / lookup.block_columns);
  if (lookup.tables_of_blocks.size() != blocks) return fail("each block must have a table");
  const std::size_t tables = lookup.tables.size() / (kEntries * entry_bytes);
  if (lookup.tables.size() % (kEntries * entry_bytes) != 0) return fail("each table must have 256 entries");
  const bool all_exist = std::ranges::all_of(lookup.tables_of_blocks, [&](std::int32_t table) {
    return table >= 0 && static_cast<std::size_t>(table) < tables;
  });
  if (!all_exist) return fail("a block has a table that does not exist");
  if (overlap(lookup.out, lookup.codes) || overlap(lookup.out, lookup.tables))
    return fail("out must not overlap what is read");
  return {};
}

using Eight = std::uint16_t __attribute__((vector_size(16)));
constexpr std::size_t kLanes = 8;

Eight interleaved_low(Eight one, Eight other) {
  return __builtin_shufflevector(one, other, 0, 8, 1, 9, 2, 10, 3, 11);
}

Eight interleaved_high(Eight one, Eight other) {
  return __builtin_shufflevector(one, other, 4, 12, 5, 13, 6, 14, 7, 15);
}

// Row i of the eight becomes column i: each of three rounds interleaves rows that are four apart.
void transpose_eight(const std::uint16_t* from, std::size_t width, std::byte* to, std::size_t stride) {
  std::array<Eight, kLanes> rows;
  for (std::size_t i = 0; i < kLanes; ++i) std::memcpy(&rows[i], from + i * width, sizeof(Eight));
  for (int round = 0; round < 3; ++round) {
    const std::array<Eight, kLanes> before = rows;
    for (std::size_t i = 0; i < kLanes / 2; ++i) {
      rows[2 * i] = interleaved_low(before[i], before[i + kLanes / 2]);
      rows[2 * i + 1] = interleaved_high(before[i], before[i + kLanes / 2]);
    }
  }
  for (std::size_t i = 0; i < kLanes; ++i) std::memcpy(to + i * stride, &rows[i], sizeof(Eight));
}

// Column i of `from`, whose rows are `width` values apart, becomes a row `stride` bytes after that before.
template <class Value>
void transpose(const Value* from, std::size_t width, std::size_t rows, std::size_t columns, std::byte* to,
               std::size_t stride) {
  const auto one_by_one = [&](std::size_t first_row, std::size_t first_column, std::size_t last_column) {
    for (std::size_t column = first_column; column < last_column; ++column) {
      for (std::size_t row = first_row; row < rows; ++row)
        std::memcpy(to + column * stride + row * sizeof(Value), from + row * width + column, sizeof(Value));
    }
  };
  std::size_t whole_rows = 0;
  std::size_t whole_columns = 0;
  if constexpr (sizeof(Value) == sizeof(std::uint16_t)) {
    whole_rows = rows / kLanes * kLanes;
    whole_columns = columns / kLanes * kLanes;
    for (std::size_t column = 0; column < whole_columns; column += kLanes) {
      for (std::size_t row = 0; row < whole_rows; row += kLanes)
        transpose_eight(from + row * width + column, width, to + column * stride + row * sizeof(Value),
                        stride);
    }
  }
  one_by_one(whole_rows, 0, whole_columns);
  one_by_one(0, whole_columns, columns);
}

// `Entry`: an unsigned integer that has the bits of kValues `Value`.
template <class Entry, class Value, std::size_t kValues>
class Task {
 public:
  explicit Task(const TableLookup& lookup)
      : lookup_(lookup), blocks_of_a_row_(lookup.columns / lookup.block_columns) {}

  void run(std::size_t first_row, std::size_t last_row) const {
    if (lookup_.transposed) {
      transposed(first_row, last_row);
    } else {
      for (std::size_t row = first_row; row < last_row; ++row) plain(row);
    }
  }

 private:
  static constexpr std::size_t kWord = sizeof(std::uint64_t);

  const std::byte* codes(std::size_t row) const { return lookup_.codes.data() + row * lookup_.columns; }

  const std::byte* table(std::size_t row, std::size_t block) const {
    const std::size_t at = row / lookup_.block_rows * blocks_of_a_row_ + block;
    const auto which = static_cast<std::size_t>(lookup_.tables_of_blocks[at]);
    return lookup_.tables.data() + which * kEntries * sizeof(Entry);
  }

  static Entry entry(const std::byte* table, std::uint64_t code) {
    Entry found;
    std::memcpy(&found, table + code * sizeof found, sizeof found);
    return found;
  }

  void plain(std::size_t row) const {
    const std::byte* code = codes(row);
    std::byte* out = lookup_.out.data() + row * lookup_.columns * sizeof(Entry);
    for (std::size_t block = 0; block < blocks_of_a_row_; ++block) {
      fill_codes(code, lookup_.block_columns, table(row, block), out);
      code += lookup_.block_columns;
      out += lookup_.block_columns * sizeof(Entry);
    }
  }

  // Eight codes at a time: fewer loads and stores, which are what it takes.
  static void fill_codes(const std::byte* code, std::size_t count, const std::byte* table, std::byte* out) {
    std::size_t i = 0;
    for (; i + kWord <= count; i += kWord) {
      std::uint64_t eight;
      std::memcpy(&eight, code + i, sizeof eight);
      for (std::size_t word = 0; word < sizeof(Entry); ++word) {
        std::uint64_t made = 0;
        for (std::size_t j = 0; j < kWord / sizeof(Entry); ++j) {
          made |= static_cast<std::uint64_t>(entry(table, eight & (kEntries - 1))) << (8 * sizeof(Entry) * j);
          eight >>= 8;
        }
        std::memcpy(out + i * sizeof(Entry) + word * kWord, &made, sizeof made);
      }
    }
    for (; i < count; ++i) {
      const Entry found = entry(table, std::to_integer<std::uint64_t>(code[i]));
      std::memcpy(out + i * sizeof found, &found, sizeof found);
    }
  }

  // In tiles that fit into the cache, which are filled row by row.
  void transposed(std::size_t first_row, std::size_t last_row) const {
    constexpr std::size_t kWidth = kColumnsOfATile * kValues;
    std::array<Value, kRowsOfATask * kWidth> tile;
    const std::size_t rows = last_row - first_row;
    for (std::size_t begin = 0; begin < lookup_.columns; begin += kColumnsOfATile) {
      const std::size_t count = std::min(kColumnsOfATile, lookup_.columns - begin);
      for (std::size_t row = 0; row < rows; ++row) {
        const std::byte* const code = codes(first_row + row) + begin;
        auto* const out = reinterpret_cast<std::byte*>(tile.data() + row * kWidth);
        for (std::size_t i = 0; i < count;) {
          const std::size_t block = (begin + i) / lookup_.block_columns;
          const std::size_t end = std::min(count, (block + 1) * lookup_.block_columns - begin);
          fill_codes(code + i, end - i, table(first_row + row, block), out + i * sizeof(Entry));
          i = end;
        }
      }
      std::byte* const out =
          lookup_.out.data() + (begin * kValues * lookup_.rows + first_row) * sizeof(Value);
      transpose<Value>(tile.data(), kWidth, rows, count * kValues, out, lookup_.rows * sizeof(Value));
    }
  }

  const TableLookup& lookup_;
  std::size_t blocks_of_a_row_;
};

template <class Entry, class Value, std::size_t kValues>
void fill(const TableLookup& lookup, std::size_t threads) {
  const Task<Entry, Value, kValues> task(lookup);
  std::atomic<std::size_t> next = 0;
  const std::size_t useful = lookup.rows * lookup.columns / kCodesOfAThread + 1;
  side_by_side(std::min(threads, useful), [&] {
    for (;;) {
      const std::size_t begin = next.fetch_add(kRowsOfATask);
      if (begin >= lookup.rows) return;
      task.run(begin, std::min(begin + kRowsOfATask, lookup.rows));
    }
  });
}

}  // namespace

Status look_up(const TableLookup& lookup, std::size_t threads) {
  // A copy, so that the numbers that were checked are those that are used, whatever others write there.
  const std::vector<std::int32_t> tables_of_blocks(lookup.tables_of_blocks.begin(),
                                                   lookup.tables_of_blocks.end());
  TableLookup safe = lookup;
  safe.tables_of_blocks = tables_of_blocks;
  if (const Status checked = check(safe); !checked) return checked;
  using Fill = void (*)(const TableLookup&, std::size_t);
  const Fill of_one =
      lookup.value_bytes == 2 ? fill<std::uint16_t, std::uint16_t, 1> : fill<std::uint32_t, std::uint32_t, 1>;
  const Fill of_two =
      lookup.value_bytes == 2 ? fill<std::uint32_t, std::uint16_t, 2> : fill<std::uint64_t, std::uint32_t, 2>;
  (lookup.values == 1 ? of_one : of_two)(safe, threads);
  return {};
}

}  // namespace trunkline
