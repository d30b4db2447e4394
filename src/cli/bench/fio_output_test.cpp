#include "cli/bench/fio_output.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>

namespace trunkline::cli {
namespace {

std::string job(int error, std::uint64_t bytes, unsigned runtime_ms, unsigned ios) {
  return fmt::format(
      R"({{"jobname": "lane0", "error": {}, "job_runtime": {}, "usr_cpu": 5.0, "sys_cpu": 15.0,
          "read": {{"io_bytes": {}, "runtime": {}, "total_ios": {},
                    "clat_ns": {{"mean": 2000.0, "percentile": {{"50.000000": 1000, "99.000000": 9000}}}}}},
          "write": {{"io_bytes": 0, "runtime": 0, "total_ios": 0, "clat_ns": {{"mean": 0.0}}}}}})",
      error, runtime_ms, bytes, runtime_ms, ios);
}

TEST(FioOutput, SumsJobsAndUsesTheLongestTime) {
  const std::string text = "fio: a warning\n{\"fio version\": \"fio-3.33\", \"jobs\": [" +
                           job(0, 1'000'000'000, 1000, 10) + "," + job(0, 3'000'000'000, 2000, 30) + "]}";
  const auto result = parse_fio_output(text, {.op = Op::read});
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ(result->bytes, 4'000'000'000U);
  EXPECT_DOUBLE_EQ(result->bytes_per_second, 2e9);
  EXPECT_DOUBLE_EQ(result->transfers_per_second, 20);
  EXPECT_DOUBLE_EQ(result->cpu_seconds_per_gb, 0.2 * 3 / 4);
  EXPECT_DOUBLE_EQ(result->latency_us_mean, 2);
  EXPECT_DOUBLE_EQ(result->latency_us_p50, 1);
  EXPECT_DOUBLE_EQ(result->latency_us_p99, 9);
}

TEST(FioOutput, RejectsNumbersThatDoNotFit) {
  const std::string text = "{\"jobs\": [" + job(0, 1'000, 1000, 10) + "]}";
  for (const auto& [number, other] :
       {std::pair{"\"io_bytes\": 1000", "\"io_bytes\": 10411111111111111111186"},
        std::pair{"\"error\": 0", "\"error\": 1e30"}}) {
    std::string changed = text;
    ASSERT_NE(changed.find(number), std::string::npos);
    changed.replace(changed.find(number), std::string_view(number).size(), other);
    const auto result = parse_fio_output(changed, {.op = Op::read});
    ASSERT_FALSE(result) << other;
    EXPECT_EQ(result.error().kind, ErrorKind::format);
  }
}

TEST(FioOutput, TheOtherDirectionIsEmpty) {
  const auto result = parse_fio_output("{\"jobs\": [" + job(0, 1000, 1, 1) + "]}", {.op = Op::write});
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ(result->bytes, 0U);
  EXPECT_EQ(result->bytes_per_second, 0);
}

TEST(FioOutput, MixedJobsAddBothDirections) {
  const std::string text = R"({"jobs": [{"error": 0, "job_runtime": 2000, "usr_cpu": 25.0, "sys_cpu": 25.0,
      "read": {"io_bytes": 7000000000, "runtime": 1000, "total_ios": 700,
               "clat_ns": {"mean": 1000.0, "percentile": {"50.000000": 1000, "99.000000": 2000}}},
      "write": {"io_bytes": 3000000000, "runtime": 2000, "total_ios": 300,
                "clat_ns": {"mean": 11000.0, "percentile": {"50.000000": 11000, "99.000000": 12000}}}}]})";
  const auto result = parse_fio_output(text, {.op = Op::write, .read_percent = 70});
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ(result->bytes, 10'000'000'000U);
  EXPECT_DOUBLE_EQ(result->bytes_per_second, 5e9);
  EXPECT_DOUBLE_EQ(result->transfers_per_second, 500);
  EXPECT_DOUBLE_EQ(result->cpu_seconds_per_gb, 0.1);
  EXPECT_DOUBLE_EQ(result->latency_us_mean, 4);
}

TEST(FioOutput, JobErrorsAreErrors) {
  const auto result = parse_fio_output("{\"jobs\": [" + job(ENOSPC, 1000, 1, 1) + "]}", {.op = Op::read});
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ENOSPC);
}

TEST(FioOutput, OtherTextIsRejected) {
  for (const char* text : {"", "fio: pid=0, err=22", "{", "[]", "{\"jobs\": [{}]}", "{\"jobs\": 3}"}) {
    const auto result = parse_fio_output(text, {.op = Op::read});
    ASSERT_FALSE(result.has_value()) << text;
    EXPECT_EQ(result.error().kind, ErrorKind::format);
  }
}

}  // namespace
}  // namespace trunkline::cli
