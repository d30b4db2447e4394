#include "cli/bench/gdsio_peer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

GdsioJob gdsio_job(Op op) {
  return {.what = {.op = op},
          .file = "/data/a",
          .file_bytes = 10 * kMiB + 5,
          .block_bytes = kMiB,
          .in_flight = 8};
}

std::string shown(const GdsioJob& job) {
  return fmt::format("{}", fmt::join(gdsio_command("gdsio", job), " "));
}

TEST(GdsioCommand, DoesTheSameWork) {
  GdsioJob job = gdsio_job(Op::read);
  EXPECT_EQ(shown(job), "gdsio -f /data/a -d 0 -w 8 -s 10240K -i 1024K -x 1 -I 0");
  job.cuda = 2;
  job.order = Order::random;
  job.in_flight = 64;  // more than there are blocks
  job.duration_s = 2.6;
  EXPECT_EQ(shown(job), "gdsio -f /data/a -d 2 -w 10 -s 10240K -i 1024K -x 0 -I 2 -T 3");
  EXPECT_NE(gdsio_terms(job).find("GPU 2"), std::string::npos);
}

TEST(GdsioCommand, Writes) {
  GdsioJob job = gdsio_job(Op::write);
  EXPECT_TRUE(shown(job).ends_with("-I 1"));
  job.order = Order::random;
  EXPECT_TRUE(shown(job).ends_with("-I 3"));
}

TEST(GdsioOutput, IsParsed) {
  const auto measured = parse_gdsio_output(
      "a warning\nIoType: READ XferType: GPUD Threads: 8 DataSetSize: 1048576/1048576(KiB) IOSize: 1024(KiB) "
      "Throughput: 2.500000 GiB/sec, Avg_Latency: 2841.500000 usecs ops: 1024 total_time 0.400000 secs\n");
  ASSERT_TRUE(measured.has_value()) << measured.error().message;
  EXPECT_EQ(measured->bytes, kGiB);
  EXPECT_DOUBLE_EQ(measured->bytes_per_second, 2.5 * static_cast<double>(kGiB));
  EXPECT_DOUBLE_EQ(measured->transfers_per_second, 2560);
  EXPECT_DOUBLE_EQ(measured->latency_us_mean, 2841.5);
}

TEST(GdsioOutput, OtherTextIsRejected) {
  for (const char* text : {"", "Throughput: x", "Throughput: 1 GiB/sec",
                           "DataSetSize: nan Throughput: -1 GiB/sec ops: 3 total_time 2"}) {
    const auto measured = parse_gdsio_output(text);
    ASSERT_FALSE(measured.has_value()) << text;
    EXPECT_EQ(measured.error().kind, ErrorKind::format);
  }
}

}  // namespace
}  // namespace trunkline::cli
