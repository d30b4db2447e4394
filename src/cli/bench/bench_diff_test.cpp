#include "cli/bench/bench_diff.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

Json results(const std::vector<Json>& rows) {
  Json document{{"command", "bench"}, {"schema", 1}, {"options", {{"block_bytes", 4096}}}};
  document["results"] = rows;
  return document;
}

Json row(const char* name, double gb_s) {
  return {{"name", name}, {"gb_s", gb_s}, {"iops", 1000 * gb_s}, {"latency_us", {{"p99", 10}}}};
}

const BenchChange& change(const BenchDifference& difference, const std::string& name,
                          const std::string& metric) {
  for (const BenchChange& each : difference.changes) {
    if (each.row == name && each.metric == metric) return each;
  }
  throw std::runtime_error("no " + metric + " of " + name);
}

TEST(BenchDiff, ASpeedThatFellByMoreThanTheLimitIsSlower) {
  const Json before = results({row("read", 10), row("write fresh", 4)});
  const Json after = results({row("read", 9.4), row("write fresh", 3.9)});
  const auto difference = compare_benches(before, after, 0.05);
  ASSERT_TRUE(difference.has_value()) << difference.error().message;
  EXPECT_TRUE(difference->any_slower());
  EXPECT_TRUE(change(*difference, "read", "gb_s").slower);
  EXPECT_DOUBLE_EQ(change(*difference, "read", "gb_s").ratio, 0.94);
  EXPECT_FALSE(change(*difference, "read", "iops").slower);
  EXPECT_FALSE(change(*difference, "write fresh", "gb_s").slower);
  EXPECT_FALSE(compare_benches(before, after, 0.07)->any_slower());
  EXPECT_FALSE(compare_benches(before, after, std::nullopt)->any_slower());
  EXPECT_FALSE(compare_benches(after, before, 0.0)->any_slower());
}

TEST(BenchDiff, EitherSpeedOfARowCounts) {
  Json before = results({row("mixed 70/30", 10)});
  Json after = before;
  before["results"][0]["writes"] = {{"gb_s", 3}};
  after["results"][0]["writes"] = {{"gb_s", 1}};
  EXPECT_TRUE(change(*compare_benches(before, after, 0.05), "mixed 70/30", "writes.gb_s").slower);
  before["results"][0]["gb_s_with_sync"] = 5;
  after["results"][0]["gb_s_with_sync"] = 4;
  EXPECT_TRUE(change(*compare_benches(before, after, 0.05), "mixed 70/30", "gb_s_with_sync").slower);
}

TEST(BenchDiff, NamesRowsThatOnlyOneHasAndOptionsThatDiffer) {
  Json after = results({row("read", 1), row("write overwrite", 1)});
  after["options"]["block_bytes"] = 65536;
  const auto difference = compare_benches(results({row("read", 1), row("write fresh", 1)}), after, 0.05);
  ASSERT_TRUE(difference.has_value());
  EXPECT_EQ(difference->only_before, std::vector<std::string>{"write fresh"});
  EXPECT_EQ(difference->only_after, std::vector<std::string>{"write overwrite"});
  EXPECT_EQ(difference->options, std::vector<std::string>{"block_bytes: 4096 -> 65536"});
}

TEST(BenchDiff, OtherDocumentsAreRejected) {
  const Json good = results({row("read", 1)});
  Json text = good;
  text["results"] = "x";
  Json newer = good;
  newer["schema"] = 2;
  Json failed = good;
  failed["error"] = "x";
  Json nameless = good;
  nameless["results"][0].erase("name");
  Json other = good;
  other["command"] = "tune";
  for (const Json& bad :
       std::vector<Json>{nullptr, Json::array(), text, newer, failed, nameless, other, results({})}) {
    const auto difference = compare_benches(good, bad, 0.05);
    ASSERT_FALSE(difference.has_value()) << bad.dump();
    EXPECT_EQ(difference.error().kind, ErrorKind::format);
    EXPECT_TRUE(difference.error().message.starts_with("the second file: "));
  }
  EXPECT_FALSE(compare_benches(good, results({row("write fresh", 1)}), 0.05).has_value());
}

TEST(BenchDiff, TheLimitIsAPercentage) {
  EXPECT_DOUBLE_EQ(parse_fail_over("5%").value(), 0.05);
  EXPECT_DOUBLE_EQ(parse_fail_over("2.5").value(), 0.025);
  EXPECT_EQ(parse_fail_over("0").value(), 0);
  for (const char* text : {"", "%", "five", "-1", "100%", "nan", "inf", "5%%", "5 %"}) {
    EXPECT_FALSE(parse_fail_over(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace trunkline::cli
