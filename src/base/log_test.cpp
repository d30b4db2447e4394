#include "base/log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace trunkline::log {
namespace {

std::vector<Record>* received = nullptr;

// Collects what is logged at `levels` while it lives.
class Captured {
 public:
  explicit Captured(const Levels& levels) {
    received = &records;
    before_ = set_sink([](Record record) { received->push_back(std::move(record)); });
    set_levels(levels);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  ~Captured() {
    set_sink(before_);
    Levels off;
    off.fill(Level::off);
    set_levels(off);
  }

  std::vector<Record> records;

 private:
  Sink before_;
};

Level level_of(const ParsedLevels& parsed, Component component) {
  return parsed.levels[static_cast<std::size_t>(component)];
}

TEST(LogParse, ALevelAloneIsForAllComponents) {
  const ParsedLevels parsed = parse("info");
  EXPECT_EQ(parsed.error, "");
  for (const Level level : parsed.levels) EXPECT_EQ(level, Level::info);
}

TEST(LogParse, ComponentsThatAreNotNamedAreOff) {
  const ParsedLevels parsed = parse("debug, engine,stream");
  EXPECT_EQ(parsed.error, "");
  EXPECT_EQ(level_of(parsed, Component::engine), Level::debug);
  EXPECT_EQ(level_of(parsed, Component::stream), Level::debug);
  EXPECT_EQ(level_of(parsed, Component::checkpoint), Level::off);
}

TEST(LogParse, WrongWordsAreNamedWithWhatThereIs) {
  EXPECT_NE(parse("loud").error.find("\"loud\" is not a level; begin with one of error, warn, info, debug"),
            std::string::npos);
  const std::string error = parse("info,motor").error;
  EXPECT_NE(error.find("\"motor\"; use some of engine, device"), std::string::npos) << error;
  EXPECT_NE(parse("info,").error, "");
  EXPECT_NE(parse("").error, "");
  for (const Level level : parse("info,motor").levels) EXPECT_EQ(level, Level::off);
}

TEST(Log, RecordsOfUnwantedLevelsAndComponentsAreNotWritten) {
  const Captured captured(parse("info,engine").levels);
  info(Component::engine, "{} lanes", 2);
  debug(Component::engine, "not wanted");
  error(Component::stream, "not wanted either");
  ASSERT_EQ(captured.records.size(), 1U);
  EXPECT_EQ(captured.records[0].message, "2 lanes");
  EXPECT_EQ(captured.records[0].level, Level::info);
  EXPECT_FALSE(captured.records[0].thread.empty());
}

TEST(Log, ALineHasTimeLevelComponentThreadAndMessage) {
  const Record record{
      .level = Level::warn,
      .component = Component::checkpoint,
      .time = std::chrono::system_clock::time_point(std::chrono::milliseconds(1'700'000'000'042)),
      .thread = "trunkline-0",
      .message = "removed a"};
  const std::string line = format_line(record);
  EXPECT_NE(line.find(".042 warn  checkpoint [trunkline-0] removed a\n"), std::string::npos) << line;
  EXPECT_EQ(line.substr(0, 6), "2023-1");
}

TEST(Log, ARateLimitCountsWhatItHoldsBack) {
  RateLimit limit;
  const auto start = std::chrono::steady_clock::time_point(std::chrono::hours(1));
  EXPECT_EQ(limit.admit(start), 0U);
  EXPECT_EQ(limit.admit(start + std::chrono::milliseconds(10)), std::nullopt);
  EXPECT_EQ(limit.admit(start + std::chrono::milliseconds(999)), std::nullopt);
  EXPECT_EQ(limit.admit(start + std::chrono::milliseconds(1001)), 2U);
  EXPECT_EQ(limit.admit(start + std::chrono::milliseconds(2500)), 0U);
}

}  // namespace
}  // namespace trunkline::log
