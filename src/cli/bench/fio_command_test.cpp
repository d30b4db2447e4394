#include "cli/bench/fio_command.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

bool has(const std::vector<std::string>& command, std::string_view argument) {
  return std::ranges::find(command, argument) != command.end();
}

FioJob job_of(Op op, WriteMode mode = WriteMode::overwrite) {
  return {.what = {.op = op, .write_mode = mode},
          .files = {"/data/a", "/data/b"},
          .file_bytes = 10 * kMiB,
          .block_bytes = kMiB,
          .queue_depth = 32};
}

TEST(FioCommand, ReadsLikeTrunkline) {
  const auto command = fio_command(job_of(Op::read));
  EXPECT_EQ(command[0], "env");
  EXPECT_EQ(command[2], "fio");
  for (const char* argument :
       {"--filename=/data/a:/data/b", "--ioengine=io_uring", "--rw=read", "--bs=1048576", "--iodepth=32",
        "--direct=1", "--name=lane0", "--offset=0", "--size=20971520"}) {
    EXPECT_TRUE(has(command, argument)) << argument;
  }
  EXPECT_FALSE(has(command, "--end_fsync=1"));
  EXPECT_FALSE(has(command, "--name=lane1"));
}

TEST(FioCommand, OrdinaryMemoryIsOrdinaryForBoth) {
  FioJob job = job_of(Op::read);
  job.huge_pages = false;
  EXPECT_EQ(fio_command(job)[0], "fio");
  EXPECT_NE(fio_terms(job).find("ordinary pages"), std::string::npos);
}

TEST(FioCommand, WritesEndWithFsync) {
  FioJob job = job_of(Op::write, WriteMode::fresh);
  job.order = Order::random;
  EXPECT_TRUE(has(fio_command(job), "--rw=randwrite"));
  EXPECT_TRUE(has(fio_command(job), "--end_fsync=1"));
  EXPECT_FALSE(has(fio_command(job), "--overwrite=1"));
  job.what.write_mode = WriteMode::preallocated;
  EXPECT_TRUE(has(fio_command(job), "--overwrite=1"));
}

TEST(FioCommand, LanesShareEveryFileWithoutGapsOrOverlaps) {
  FioJob job = job_of(Op::read);
  job.lanes = 3;
  const auto command = fio_command(job);
  // 10 blocks over 3 lanes: 3, 3, 4; for each of two files.
  for (const char* argument :
       {"--offset=0", "--offset=3145728", "--offset=6291456", "--size=6291456", "--size=8388608"}) {
    EXPECT_TRUE(has(command, argument)) << argument;
  }
  EXPECT_TRUE(has(command, "--name=lane2"));
  EXPECT_FALSE(has(command, "--name=lane3"));
}

TEST(FioCommand, ThreadsBecomeJobsOfPsync) {
  FioJob job = job_of(Op::read);
  job.backend = BackendKind::threads;
  job.queue_depth = 4;
  const auto command = fio_command(job);
  EXPECT_TRUE(has(command, "--ioengine=psync"));
  EXPECT_TRUE(has(command, "--iodepth=1"));
  EXPECT_EQ(std::ranges::count_if(command, [](const auto& each) { return each.starts_with("--name=lane"); }),
            4);
  job.file_bytes = 2 * kMiB;  // every job has a block
  const auto small = fio_command(job);
  EXPECT_EQ(std::ranges::count_if(small, [](const auto& each) { return each.starts_with("--name=lane"); }),
            2);
}

TEST(FioCommand, TimeBasedOnlyWhereRepeatingIsTheSameWork) {
  FioJob job = job_of(Op::read);
  job.duration_s = 1.5;
  EXPECT_TRUE(has(fio_command(job), "--runtime=1500ms"));
  job.what = {.op = Op::write, .write_mode = WriteMode::fresh};
  EXPECT_FALSE(has(fio_command(job), "--time_based=1"));
}

TEST(FioCommand, MixesAndRangesAreFios) {
  FioJob job = job_of(Op::write);
  job.what.read_percent = 70;
  job.least_block_bytes = 4096;
  job.seed = 9;
  auto command = fio_command(job);
  for (const char* argument : {"--rw=rw", "--rwmixread=70", "--bsrange=4096-1048576", "--randseed=9",
                               "--overwrite=1", "--end_fsync=1"}) {
    EXPECT_TRUE(has(command, argument)) << argument;
  }
  EXPECT_FALSE(has(command, "--bs=1048576"));
  EXPECT_NE(fio_terms(job).find("blocks of 4096 to 1048576 bytes, 70% of them read"), std::string::npos);
  job.order = Order::random;
  job.least_block_bytes = job.block_bytes;
  command = fio_command(job);
  EXPECT_TRUE(has(command, "--rw=randrw"));
  EXPECT_TRUE(has(command, "--bs=1048576"));
}

TEST(FioCommand, ColonsInNamesAreEscaped) {
  FioJob job = job_of(Op::read);
  job.files = {"/data/a:b\\c"};
  EXPECT_TRUE(has(fio_command(job), "--filename=/data/a\\:b\\\\c"));
}

}  // namespace
}  // namespace trunkline::cli
