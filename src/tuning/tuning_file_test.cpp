#include "tuning/tuning_file.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tuning/tuning_fixture.h"

namespace trunkline::tuning {
namespace {

using test::some_tuning;

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(TuningFile, SurvivesARoundTrip) {
  Tuning defaults = some_tuning();
  defaults.settings = {};
  defaults.storages.push_back({"xfs", "/dev/nvme1n1", "0000000000000001"});
  const std::vector<Tuning> tunings{some_tuning(), defaults};
  const auto parsed = parse_tunings(format_tunings(tunings), "t.json");
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(*parsed, tunings);
  EXPECT_TRUE(parse_tunings(format_tunings({}), "t.json")->empty());
}

TEST(TuningFile, WritesPathsThatAreNotUtf8) {
  Tuning tuning = some_tuning();
  tuning.paths = {"/data/\xff"};
  EXPECT_TRUE(parse_tunings(format_tunings({tuning}), "t.json"));
}

TEST(TuningFile, RejectsWhatItWouldNotWrite) {
  const std::string good = format_tunings({some_tuning()});
  const std::vector<std::string> bad{
      "",
      "{}",
      good + "x",
      good.substr(0, good.size() / 2),
      replaced(good, "trunkline-tuning", "trunkline-stripe"),
      replaced(good, "\"version\": 1", "\"version\": 0"),
      replaced(good, "\"version\": 1", "\"version\": \"1\""),
      replaced(good, "\"version\": 1", "\"version\": 1, \"extra\": 1"),
      replaced(good, "\"lanes\": 3", "\"lanes\": 0"),
      replaced(good, "\"lanes\": 3", "\"lanes\": 65"),
      replaced(good, "\"lanes\": 3", "\"lanes\": 4294967299"),
      replaced(good, "\"lanes\": 3", "\"lanes\": -3"),
      replaced(good, "\"lanes\": 3", "\"lanes\": 3.0"),
      replaced(good, "\"lanes\": 3", "\"lanes\": 3, \"lanes\": 3"),
      replaced(good, "\"lanes\": 3", "\"lane\": 3"),
      replaced(good, "\"queue_depth\": 7", "\"queue_depth\": 4097"),
      replaced(good, "\"block_bytes\": 1048576", "\"block_bytes\": 1048577"),
      replaced(good, "\"block_bytes\": 1048576", "\"block_bytes\": 2147483648"),
      replaced(good, "\"libaio\"", "\"memory\""),
      replaced(good, "\"libaio\"", "\"auto\""),
      replaced(good, "\"libaio\"", "\"posix\""),
      replaced(good, "\"direct\": false", "\"direct\": 0"),
      replaced(good, "\"filesystem\": \"ext4\",", ""),
      replaced(good, "\"filesystem\": \"ext4\"", "\"filesystem\": 4"),
      replaced(good, "\"machine\"", "\"Machine\""),
      replaced(good, "\"sequential write\"", "\"random read\""),
      replaced(good, "\"tuned_bytes_per_second\": 400", "\"tuned_bytes_per_second\": 1e3"),
  };
  for (const std::string& text : bad) {
    const auto parsed = parse_tunings(text, "t.json");
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().kind, ErrorKind::format) << text;
    EXPECT_NE(parsed.error().message.find("t.json does not hold settings that trunkline tune saved: "),
              std::string::npos);
  }
}

TEST(TuningFile, RejectsStoragesOutOfOrder) {
  Tuning tuning = some_tuning();
  tuning.storages = {{"xfs", "b", "0"}, {"ext4", "a", "0"}};
  EXPECT_FALSE(parse_tunings(format_tunings({tuning}), "t.json"));
  tuning.storages = {{"xfs", "b", "0"}, {"xfs", "b", "0"}};
  EXPECT_FALSE(parse_tunings(format_tunings({tuning}), "t.json"));
  tuning.storages = {};
  EXPECT_FALSE(parse_tunings(format_tunings({tuning}), "t.json"));
}

TEST(TuningFile, RecognizesANewerVersionWhateverItHolds) {
  const auto parsed = parse_tunings(R"({"format": "trunkline-tuning", "version": 2, "other": []})", "t.json");
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().kind, ErrorKind::unsupported);
  EXPECT_NE(parsed.error().message.find("version 2"), std::string::npos) << parsed.error().message;
}

TEST(TuningFile, RejectsTooMuch) {
  EXPECT_FALSE(parse_tunings(std::string(kMaxFileBytes + 1, ' '), "t.json"));
  EXPECT_FALSE(parse_tunings(format_tunings(std::vector(kMaxTunings + 1, some_tuning())), "t.json"));
  EXPECT_TRUE(parse_tunings(format_tunings(std::vector(kMaxTunings, some_tuning())), "t.json"));
}

TEST(Settings, AreDescribed) {
  EXPECT_EQ(to_string(Settings{}), "the defaults");
  EXPECT_EQ(to_string(some_tuning().settings), "libaio, 3 lanes, queue depth 7, blocks of 1 MiB, page cache");
  EXPECT_EQ(to_string(Settings{.lanes = 1}), "1 lane");
}

}  // namespace
}  // namespace trunkline::tuning
