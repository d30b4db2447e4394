// Random matrices against a simple model, and sizes that do not fit together.
#include "stream/table_lookup.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace trunkline {
namespace {

struct Matrices {
  std::vector<std::byte> codes;
  std::vector<std::int32_t> tables_of_blocks;
  std::vector<std::byte> tables;
  std::vector<std::byte> out;
  TableLookup lookup;
};

void fill(std::vector<std::byte>& bytes, std::mt19937& rng) {
  for (std::byte& each : bytes) each = static_cast<std::byte>(rng() % 256);
}

// Of random sizes and contents.
Matrices random_matrices(std::mt19937& rng, std::size_t most) {
  Matrices made;
  TableLookup& lookup = made.lookup;
  lookup.block_rows = 1 + rng() % 5;
  lookup.block_columns = 1 + rng() % 40;
  lookup.rows = lookup.block_rows * (rng() % most);
  lookup.columns = lookup.block_columns * (rng() % most);
  lookup.values = 1 + rng() % 2;
  lookup.value_bytes = 2 + 2 * (rng() % 2);
  lookup.transposed = rng() % 2 == 0;
  const std::size_t count = 1 + rng() % 7;
  made.codes.resize(lookup.rows * lookup.columns);
  made.tables.resize(count * 256 * lookup.values * lookup.value_bytes);
  made.out.resize(made.codes.size() * lookup.values * lookup.value_bytes);
  for (std::size_t block = 0; block < made.codes.size() / (lookup.block_rows * lookup.block_columns); ++block)
    made.tables_of_blocks.push_back(static_cast<std::int32_t>(rng() % count));
  fill(made.codes, rng);
  fill(made.tables, rng);
  fill(made.out, rng);
  lookup.codes = made.codes;
  lookup.tables_of_blocks = made.tables_of_blocks;
  lookup.tables = made.tables;
  lookup.out = made.out;
  return made;
}

std::vector<std::byte> model_of(const TableLookup& lookup) {
  std::vector<std::byte> made(lookup.out.size());
  const std::size_t entry_bytes = lookup.values * lookup.value_bytes;
  const std::size_t width = lookup.columns * lookup.values;
  for (std::size_t row = 0; row < lookup.rows; ++row) {
    for (std::size_t column = 0; column < lookup.columns; ++column) {
      const std::size_t block =
          row / lookup.block_rows * (lookup.columns / lookup.block_columns) + column / lookup.block_columns;
      const auto table = static_cast<std::size_t>(lookup.tables_of_blocks[block]);
      const auto code = std::to_integer<std::size_t>(lookup.codes[row * lookup.columns + column]);
      for (std::size_t value = 0; value < lookup.values; ++value) {
        const std::size_t at = column * lookup.values + value;
        const std::size_t to = lookup.transposed ? at * lookup.rows + row : row * width + at;
        const std::size_t from = (table * 256 + code) * entry_bytes + value * lookup.value_bytes;
        std::memcpy(made.data() + to * lookup.value_bytes, lookup.tables.data() + from, lookup.value_bytes);
      }
    }
  }
  return made;
}

TEST(TableLookup, EveryByteBecomesTheValuesOfItsBlocksTable) {
  std::mt19937 rng(7);
  for (int round = 0; round < 300; ++round) {
    Matrices made = random_matrices(rng, round < 290 ? 12 : 90);
    ASSERT_TRUE(look_up(made.lookup, rng() % 4).has_value());
    ASSERT_EQ(made.out, model_of(made.lookup)) << "round " << round;
  }
}

TEST(TableLookup, SizesThatDoNotFitTogetherAreRejectedBeforeAnythingIsWritten) {
  std::mt19937 rng(8);
  Matrices made = random_matrices(rng, 12);
  while (made.codes.empty() || made.lookup.block_columns == 1) made = random_matrices(rng, 12);
  const auto rejects = [&](auto change, std::string_view text) {
    TableLookup changed = made.lookup;
    change(changed);
    const std::vector<std::byte> before = made.out;
    const Status status = look_up(changed, 2);
    ASSERT_FALSE(status.has_value()) << text;
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(status.error().message.find(text), std::string::npos) << status.error().message;
    EXPECT_EQ(made.out, before);
  };
  rejects([](TableLookup& each) { each.block_rows = 0; }, "multiples");
  rejects([](TableLookup& each) { each.columns += 1; }, "multiples");
  rejects([](TableLookup& each) { each.rows += each.block_rows; }, "rows * columns");
  rejects([](TableLookup& each) { each.rows = each.block_rows * (SIZE_MAX / each.block_rows); }, "rows *");
  rejects([](TableLookup& each) { each.columns = 0; }, "rows * columns");
  rejects(
      [](TableLookup& each) {  // of which products are 0 modulo 2^64
        each.codes = each.codes.first(1);
        each.rows = 0;
        each.columns = std::size_t{1} << 63;
        each.block_rows = each.block_columns = std::size_t{1} << 32;
      },
      "rows * columns");
  rejects(
      [](TableLookup& each) {
        each.tables_of_blocks = {};
        each.out = {};
      },
      "rows * columns");
  rejects([](TableLookup& each) { each.values = 3; }, "1 or 2 values");
  rejects([](TableLookup& each) { each.value_bytes = 8; }, "2 or 4 bytes");
  rejects([](TableLookup& each) { each.out = each.out.subspan(1); }, "as many entries");
  rejects([](TableLookup& each) { each.tables = each.tables.subspan(1); }, "256 entries");
  rejects([](TableLookup& each) { each.tables = {}; }, "does not exist");
  rejects([](TableLookup& each) { each.tables_of_blocks = each.tables_of_blocks.subspan(1); },
          "must have a table");
  std::vector<std::byte> shared(made.codes.size() + made.out.size());
  for (const std::size_t begin : {std::size_t{0}, made.codes.size() - 1}) {
    rejects(
        [&](TableLookup& each) {
          each.codes = std::span(shared).first(each.codes.size());
          each.out = std::span(shared).subspan(begin, each.out.size());
        },
        "must not overlap");
  }
  for (const std::int32_t table : {-1, 1'000}) {
    made.tables_of_blocks.back() = table;
    rejects([](TableLookup&) {}, "does not exist");
  }
}

}  // namespace
}  // namespace trunkline
