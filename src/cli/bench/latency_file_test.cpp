#include "cli/bench/latency_file.h"

#include <gtest/gtest.h>

#include <sstream>

#include "support/temp_directory.h"

namespace trunkline::cli {
namespace {

TEST(ExactPercentile, IsTheNearestRank) {
  EXPECT_EQ(exact_percentile({}, 50), 0U);
  EXPECT_EQ(exact_percentile({7}, 0), 7U);
  EXPECT_EQ(exact_percentile({7}, 99.9), 7U);
  std::vector<std::uint64_t> hundred;
  for (std::uint64_t each = 1; each <= 100; ++each) hundred.push_back(each);
  EXPECT_EQ(exact_percentile(hundred, 50), 50U);
  EXPECT_EQ(exact_percentile(hundred, 99), 99U);
  EXPECT_EQ(exact_percentile(hundred, 99.9), 100U);
  EXPECT_EQ(exact_percentile(hundred, 100), 100U);
}

TEST(LatencyFile, WritesTransfersInTheOrderOfTheirTimes) {
  const test::TempDirectory directory;
  const std::string path = directory.file("log.csv");
  io::LatencyLog first(10);
  io::LatencyLog second(10);
  first.add({.submitted_ns = 5'002'500, .took_ns = 1'234'567, .offset = 8192, .bytes = 4096, .op = Op::read});
  second.add({.submitted_ns = 5'000'000, .took_ns = 999, .offset = 0, .bytes = 8192, .op = Op::write});
  Latencies latencies;
  {
    auto file = LatencyFile::create(path);
    ASSERT_TRUE(file.has_value());
    ASSERT_TRUE(file->add("mixed 70/30", 2, {first, second}, latencies).has_value());
  }
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(text.str(),
            "row,run,time_us,latency_us,operation,offset,bytes\n"
            "mixed 70/30,2,0.000,0.999,write,0,8192\n"
            "mixed 70/30,2,2.500,1234.567,read,8192,4096\n");
  EXPECT_EQ(latencies.reads, std::vector<std::uint64_t>{1'234'567});
  EXPECT_EQ(latencies.writes, std::vector<std::uint64_t>{999});
}

TEST(LatencyFile, ALogThatLacksTransfersIsAnError) {
  const test::TempDirectory directory;
  io::LatencyLog full(1);
  full.add({.took_ns = 1});
  full.add({.took_ns = 2});
  Latencies latencies;
  auto file = LatencyFile::create(directory.file("log.csv"));
  const auto added = file->add("read", 1, {full}, latencies);
  ASSERT_FALSE(added.has_value());
  EXPECT_EQ(added.error().kind, ErrorKind::unsupported);
  EXPECT_NE(added.error().message.find("--duration"), std::string::npos);
}

TEST(LatencyFile, AFolderThatIsMissingIsNamed) {
  const auto file = LatencyFile::create("/no/such/folder/log.csv");
  ASSERT_FALSE(file.has_value());
  EXPECT_NE(file.error().message.find("/no/such/folder"), std::string::npos);
}

}  // namespace
}  // namespace trunkline::cli
