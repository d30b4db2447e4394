#include "cli/seconds.h"

#include <gtest/gtest.h>

namespace trunkline::cli {
namespace {

TEST(Seconds, AreReadWithTheirUnit) {
  EXPECT_EQ(*parse_seconds("--budget", "90"), 90);
  EXPECT_EQ(*parse_seconds("--budget", "1.5min"), 90);
  EXPECT_EQ(*parse_seconds("--budget", "60s"), 60);
  EXPECT_EQ(*parse_seconds("--budget", "2h"), 7200);
}

TEST(Seconds, NameTheOptionWhereTheyAreWrong) {
  for (const char* text : {"", "s", "-1s", "nan", "inf", "1 s", "1d", "1e999"}) {
    const auto parsed = parse_seconds("--budget", text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_TRUE(parsed.error().message.starts_with("--budget: ")) << parsed.error().message;
  }
}

}  // namespace
}  // namespace trunkline::cli
