#include "cli/progress.h"

#include <gtest/gtest.h>

#include <sstream>

namespace trunkline::cli {
namespace {

using std::chrono::milliseconds;

class ProgressTest : public testing::Test {
 protected:
  static Progress::Time at(int ms) { return Progress::Time{} + milliseconds(ms); }

  std::ostringstream out;
};

TEST_F(ProgressTest, RedrawsOneLineOnATerminal) {
  Progress progress(out, true);
  progress.begin("read 1/3", 2'000'000'000, 0, at(0));
  progress.update(100'000'000, at(100));  // too early for a new line
  EXPECT_EQ(out.str(), "");
  progress.update(500'000'000, at(500));
  EXPECT_EQ(out.str(), "\r\033[Kread 1/3: 1.00 GB/s now, 1.00 GB/s average, 25%, 2 s left");
  out.str("");
  progress.update(1'500'000'000, at(1000));
  EXPECT_EQ(out.str(), "\r\033[Kread 1/3: 2.00 GB/s now, 1.50 GB/s average, 75%, 0 s left");
  out.str("");
  progress.note("done");
  EXPECT_EQ(out.str(), "\r\033[Kdone\n");
  out.str("");
  progress.end();
  EXPECT_EQ(out.str(), "");
}

TEST_F(ProgressTest, ABarShowsTheFractionDone) {
  Progress progress(out, true, Progress::Style::bar);
  progress.begin("step 7", 2'000'000'000, 0, at(0));
  progress.update(500'000'000, at(500));
  EXPECT_EQ(out.str(),
            "\r\033[Kstep 7: [######..................] 1.00 GB/s now, 1.00 GB/s average, 25%, 2 s left");
  progress.update(3'000'000'000, at(1000));
  EXPECT_NE(out.str().find("[########################]"), std::string::npos) << out.str();
}

TEST_F(ProgressTest, WritesFewPlainLinesElsewhere) {
  Progress progress(out, false);
  progress.begin("write fresh 2/3", 10'000'000'000, 0, at(0));
  for (int ms = 200; ms < 2000; ms += 200)
    progress.update(static_cast<std::uint64_t>(ms) * 1'000'000, at(ms));
  EXPECT_EQ(out.str(), "");
  for (int ms = 2000; ms < 7000; ms += 200)
    progress.update(static_cast<std::uint64_t>(ms) * 1'000'000, at(ms));
  EXPECT_EQ(out.str(), "write fresh 2/3: 1.00 GB/s now, 1.00 GB/s average, 20%, 8 s left\n");
  progress.update(7'000'000'000, at(7000));
  EXPECT_NE(out.str().find("70%, 3 s left\n"), std::string::npos);
  progress.end();
  EXPECT_EQ(out.str().find('\r'), std::string::npos);
}

TEST_F(ProgressTest, TheDurationDeterminesTheFractionDone) {
  Progress progress(out, true);
  progress.begin("read", 1'000, 10, at(0));
  progress.update(5'000'000'000, at(2500));
  EXPECT_NE(out.str().find("25%, 8 s left"), std::string::npos) << out.str();
}

TEST_F(ProgressTest, NothingToTransferDoesNotDivideByZero) {
  Progress progress(out, true);
  progress.begin("read", 0, 0, at(0));
  progress.update(0, at(300));
  EXPECT_NE(out.str().find("0%, 0 s left"), std::string::npos) << out.str();
}

}  // namespace
}  // namespace trunkline::cli
