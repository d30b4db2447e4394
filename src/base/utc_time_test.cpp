#include "base/utc_time.h"

#include <gtest/gtest.h>

#include <string_view>

namespace trunkline {
namespace {

TEST(UtcTime, HasAllDigitsWhateverTheTime) {
  struct Case {
    std::time_t seconds;
    std::string_view text;
    std::string_view name;
  };
  const Case cases[] = {
      {0, "1970-01-01T00:00:00Z", "19700101T000000Z"},
      {1709164800, "2024-02-29T00:00:00Z", "20240229T000000Z"},
      {1769903999, "2026-01-31T23:59:59Z", "20260131T235959Z"},
      {4102444799, "2099-12-31T23:59:59Z", "20991231T235959Z"},
  };
  for (const auto& [seconds, text, name] : cases) {
    EXPECT_EQ(utc_time(seconds), text);
    EXPECT_EQ(utc_time_for_name(seconds), name);
  }
}

}  // namespace
}  // namespace trunkline
