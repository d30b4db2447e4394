#include "os/exit_timeout.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>

namespace trunkline::os {
namespace {

using std::chrono::seconds;

TEST(StallTimer, IsRestartedByProgressAlone) {
  const StallTimer<std::uint64_t>::Clock::time_point start{};
  StallTimer<std::uint64_t> timer(0, start);
  EXPECT_EQ(timer.stalled_for(0, start + seconds(100)), seconds(100));
  EXPECT_EQ(timer.stalled_for(1, start + seconds(119)), seconds(0));
  EXPECT_EQ(timer.stalled_for(1, start + seconds(120)), seconds(1));
  EXPECT_EQ(timer.stalled_for(1, start + seconds(239)), seconds(120));
  EXPECT_EQ(timer.stalled_for(9, start + seconds(1000)), seconds(0));
}

}  // namespace
}  // namespace trunkline::os
