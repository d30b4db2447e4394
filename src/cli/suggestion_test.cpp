#include "cli/suggestion.h"

#include <gtest/gtest.h>

#include <array>

namespace trunkline::cli {
namespace {

const std::array<std::string, 5> kKnown{"doctor", "bench", "checkpoint", "pack", "plan"};

TEST(NearestName, FindsWhatWasProbablyMeant) {
  EXPECT_EQ(nearest_name("plna", std::array<std::string, 1>{"plans"}), std::nullopt);  // 2 of 5 differ
  EXPECT_EQ(nearest_name("plam", kKnown), "plan");
  EXPECT_EQ(nearest_name("packs", kKnown), "pack");
  EXPECT_EQ(nearest_name("docter", kKnown), "doctor");
  EXPECT_EQ(nearest_name("chekcpoint", kKnown), "checkpoint");
  EXPECT_EQ(nearest_name("bench", kKnown), "bench");
}

TEST(NearestName, SuggestsNothingThatIsFarFromIt) {
  EXPECT_EQ(nearest_name("foo", kKnown), std::nullopt);
  EXPECT_EQ(nearest_name("", kKnown), std::nullopt);
  EXPECT_EQ(nearest_name("measurement", kKnown), std::nullopt);
  EXPECT_EQ(nearest_name("plan", {}), std::nullopt);
}

TEST(NearestName, PrefersTheFirstOfEqualOnes) {
  EXPECT_EQ(nearest_name("cat", std::array<std::string, 2>{"bat", "rat"}), "bat");
}

}  // namespace
}  // namespace trunkline::cli
