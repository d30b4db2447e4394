#include "trunkline/units.h"

#include <gtest/gtest.h>

#include <limits>

namespace trunkline {
namespace {

TEST(ParseBytes, AcceptsNumbersWithAndWithoutUnits) {
  struct Case {
    std::string_view text;
    std::uint64_t bytes;
  };
  for (const auto& [text, bytes] : {Case{"0", 0},
                                    {"4096", 4096},
                                    {"0004096", 4096},
                                    {"17B", 17},
                                    {"1kB", 1000},
                                    {"400MB", 400'000'000},
                                    {"4GiB", 4ULL << 30},
                                    {"4 gib", 4ULL << 30},
                                    {"  2\tTB ", 2'000'000'000'000},
                                    {"1.5 GiB", 3ULL << 29},
                                    {"1.5kB", 1500},
                                    {"0.001 kB", 1},
                                    {"0.000001MB", 1},
                                    {"0.0009765625KiB", 1},
                                    {"2.0", 2},
                                    {"1.50000000000000000000000000 kB", 1500},
                                    {"18446744073709551615", std::numeric_limits<std::uint64_t>::max()},
                                    {"16777215.5TiB", (16777215ULL << 40) + (1ULL << 39)}}) {
    const auto parsed = parse_bytes(text);
    ASSERT_TRUE(parsed) << text << ": " << parsed.error().message;
    EXPECT_EQ(*parsed, bytes) << text;
  }
}

TEST(ParseBytes, RejectsWithTheReason) {
  struct Case {
    std::string_view text;
    std::string_view why;
  };
  for (const auto& [text, why] : {Case{"", "is empty"},
                                  {"   ", "is empty"},
                                  {"-1", "negative"},
                                  {"-1GB", "negative"},
                                  {"+1", "does not start with a digit"},
                                  {"GB", "does not start with a digit"},
                                  {".5GB", "does not start with a digit"},
                                  {"1.GB", "no digit after the point"},
                                  {"64k", "\"k\" is not a unit"},
                                  {"1G", "\"G\" is not a unit"},
                                  {"1Gb/s", "is not a unit"},
                                  {"1 2", "is not a unit"},
                                  {"0x10", "is not a unit"},
                                  {"1e9", "is not a unit"},
                                  {"1,5GB", "is not a unit"},
                                  {"1PB", "is not a unit"},
                                  {"0.5", "whole number"},
                                  {"1.5B", "whole number"},
                                  {"1.0001kB", "whole number"},
                                  {"0.3KiB", "whole number"},
                                  {"0.1234567890123456789TB", "whole number"},
                                  {"18446744073709551616", "64 bits"},
                                  {"99999999999999999999999", "64 bits"},
                                  {"16777216TiB", "64 bits"},
                                  {"18446744073709551615kB", "64 bits"}}) {
    const auto parsed = parse_bytes(text);
    ASSERT_FALSE(parsed) << text << " gave " << *parsed;
    EXPECT_EQ(parsed.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(parsed.error().message.find(why), std::string::npos) << text << ": " << parsed.error().message;
  }
}

TEST(ParseBytes, AMessageDoesNotRepeatALongTextInFull) {
  const auto parsed = parse_bytes(std::string(100'000, 'x'));
  ASSERT_FALSE(parsed);
  EXPECT_LT(parsed.error().message.size(), 400U);
}

TEST(FormatBytes, ChoosesTheUnit) {
  struct Case {
    std::uint64_t bytes;
    std::string_view text;
  };
  for (const auto& [bytes, text] : {Case{0, "0 B"},
                                    {17, "17 B"},
                                    {999, "999 B"},
                                    {1000, "1.00 kB"},
                                    {1024, "1.0 KiB"},
                                    {112 * kKiB, "112.0 KiB"},
                                    {976 * kKiB, "976.0 KiB"},
                                    {123'456, "123 kB"},
                                    {999'499, "999 kB"},
                                    {999'500, "1.00 MB"},
                                    {kMiB, "1.05 MB"},
                                    {9'994'999, "9.99 MB"},
                                    {9'996'000, "10.0 MB"},
                                    {99'960'000, "100 MB"},
                                    {999'999'999, "1.00 GB"},
                                    {kGB, "1.00 GB"},
                                    {15'300'000'000, "15.3 GB"},
                                    {std::numeric_limits<std::uint64_t>::max(), "18.4 EB"}}) {
    EXPECT_EQ(format_bytes(bytes), text);
  }
}

TEST(FormatSize, IsExactWhereAUnitFits) {
  EXPECT_EQ(format_size(64 * kMiB), "64 MiB");
  EXPECT_EQ(format_size(kGiB), "1 GiB");
  EXPECT_EQ(format_size(20 * kGB), "20 GB");
  EXPECT_EQ(format_size(3000 * kGB), "3 TB");
  EXPECT_EQ(format_size(4096), "4 KiB");
  EXPECT_EQ(format_size(1'500'000), "1500 kB");
  EXPECT_EQ(format_size(4'210'123'777), "4.21 GB");
  EXPECT_EQ(format_size(0), "0 B");
}

TEST(FormatRate, HasThreeDigits) {
  EXPECT_EQ(format_rate(3.98e9), "3.98 GB/s");
  EXPECT_EQ(format_rate(420e6), "420 MB/s");
  EXPECT_EQ(format_rate(999.6e6), "1.00 GB/s");
  EXPECT_EQ(format_rate(12.34), "12.3 B/s");
  EXPECT_EQ(format_rate(0), "0.00 B/s");
  EXPECT_EQ(format_rate(std::numeric_limits<double>::infinity()), "inf B/s");
}

}  // namespace
}  // namespace trunkline
