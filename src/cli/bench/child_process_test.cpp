#include "cli/bench/child_process.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace trunkline::cli {
namespace {

TEST(ChildProcess, ReturnsStatusAndBothOutputs) {
  const auto finished = run_to_end({"sh", "-c", "echo out; echo err >&2; exit 3"});
  ASSERT_TRUE(finished.has_value()) << finished.error().message;
  EXPECT_EQ(finished->status, 3);
  EXPECT_EQ(finished->output, "out\n");
  EXPECT_EQ(finished->errors, "err\n");
}

TEST(ChildProcess, OutputMayExceedAnyPipe) {
  const auto finished = run_to_end({"sh", "-c", "head -c 300000 /dev/zero"});
  ASSERT_TRUE(finished.has_value()) << finished.error().message;
  EXPECT_EQ(finished->output.size(), 300'000U);
}

TEST(ChildProcess, TerminationBySignalIsReported) {
  const auto finished = run_to_end({"sh", "-c", "kill -9 $$"});
  ASSERT_TRUE(finished.has_value()) << finished.error().message;
  EXPECT_EQ(finished->status, 128 + 9);
}

TEST(ChildProcess, AMissingProgramIsENOENT) {
  const auto finished = run_to_end({"trunkline-no-such-program"});
  ASSERT_FALSE(finished.has_value());
  EXPECT_EQ(finished.error().code, ENOENT);
}

}  // namespace
}  // namespace trunkline::cli
