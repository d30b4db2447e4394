#include "cli/text_table.h"

#include <gtest/gtest.h>

namespace trunkline::cli {
namespace {

TEST(TextTable, AlignsColumnsAndOmitsEmptyOnes) {
  TextTable table({"", "GB/s", "unused", "ratio"});
  table.add({"read", "12.34", "", "1"});
  table.add({"overwrite", "5", "", ""});
  EXPECT_EQ(table.render(),
            "            GB/s  ratio\n"
            "read       12.34      1\n"
            "overwrite      5\n");
}

}  // namespace
}  // namespace trunkline::cli
