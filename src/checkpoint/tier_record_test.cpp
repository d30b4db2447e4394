#include "checkpoint/tier_record.h"

#include <gtest/gtest.h>

namespace trunkline::checkpoint {
namespace {

const TierRecord kRecord{
    .id = "0011223344556677",
    .identity = 18446744073709551615U,
    .tiers = {{.directory = "/shared/run", .id = "8899aabbccddeeff"}, {.directory = "/far/run", .id = ""}}};

std::string record_with(std::string_view from, std::string_view to) {
  std::string text = *format_tier_record(kRecord);
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(TierRecord, IsReadBackAsWritten) {
  for (const TierRecord& record :
       {kRecord, TierRecord{.id = "0123456789abcdef", .identity = 0, .tiers = {}}}) {
    const auto parsed = parse_tier_record(*format_tier_record(record), "t");
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(*parsed, record);
  }
}

TEST(TierRecord, AnyFlippedBitCutOrAdditionalByteIsFound) {
  const std::string text = *format_tier_record(kRecord);
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(parse_tier_record(flipped, "t")) << "bit " << bit;
  }
  for (std::size_t bytes = 0; bytes < text.size(); ++bytes)
    EXPECT_FALSE(parse_tier_record(text.substr(0, bytes), "t")) << bytes;
  EXPECT_FALSE(parse_tier_record(text + "\n", "t"));
}

TEST(TierRecord, ErrorsNameTheFileAndTheReason) {
  struct Case {
    std::string text;
    ErrorKind kind;
    std::string_view why;
  };
  const Case cases[] = {
      {"", ErrorKind::format, "JSON"},
      {"{}", ErrorKind::format, "\"format\""},
      {record_with("\"version\": 2", "\"version\": 3"), ErrorKind::format, "newer version"},
      {record_with("\"version\": 2", "\"version\": 1"), ErrorKind::format, "\"version\" is not 2"},
      {record_with("18446744073709551615", "-1"), ErrorKind::format, "\"identity\""},
      {record_with("0011223344556677", "0011223344556677X"), ErrorKind::format, "\"id\""},
      {record_with("\"tiers\": [", "\"tiers\": [1,"), ErrorKind::format, "\"directory\""},
      {record_with("/shared/run", "shared/run"), ErrorKind::format, "\"directory\""},
      {record_with("8899aabbccddeeff", "8899aabbccddeef"), ErrorKind::format, "valid \"id\""},
      {record_with("/shared/run", "/shared/ruN"), ErrorKind::corrupt, "damaged or edited"},
  };
  for (const Case& each : cases) {
    const auto parsed = parse_tier_record(each.text, "/run/tiers");
    ASSERT_FALSE(parsed) << each.text;
    EXPECT_EQ(parsed.error().kind, each.kind) << parsed.error().message;
    EXPECT_TRUE(parsed.error().message.starts_with("/run/tiers "));
    EXPECT_NE(parsed.error().message.find(each.why), std::string::npos) << parsed.error().message;
  }
}

TEST(TierRecord, APathThatIsNotUtf8IsRejected) {
  const auto text = format_tier_record(
      {.id = "0011223344556677", .identity = 1, .tiers = {{.directory = "/\xff", .id = ""}}});
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().kind, ErrorKind::invalid_argument);
}

}  // namespace
}  // namespace trunkline::checkpoint
