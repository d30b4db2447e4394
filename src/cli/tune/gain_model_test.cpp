#include "cli/tune/gain_model.h"

#include <gtest/gtest.h>

#include <cmath>

namespace trunkline::cli {
namespace {

TEST(GainModel, RepeatsWhatWasMeasuredWithoutNoise) {
  const GainModel model(
      {{.at = {}, .log_gain = 0}, {.at = {1}, .log_gain = 0.2}, {.at = {0, 2}, .log_gain = -0.4}});
  EXPECT_NEAR(model.at({}).log_gain, 0, 1e-3);
  EXPECT_NEAR(model.at({1}).log_gain, 0.2, 1e-3);
  EXPECT_NEAR(model.at({0, 2}).log_gain, -0.4, 1e-3);
  EXPECT_NEAR(model.at({1}).deviation, 0, 1e-3);
}

TEST(GainModel, PredictsThatTwoImprovementsAddUp) {
  const GainModel model({{.at = {}}, {.at = {3}, .log_gain = 0.2}, {.at = {0, 3}, .log_gain = 0.2}});
  const auto both = model.at({3, 3});
  EXPECT_GT(both.log_gain, 0.15);
  EXPECT_GT(both.log_gain, model.at({3, 0, 3}).log_gain + 0.05);
  EXPECT_GT(both.deviation, 0.05);  // and is not sure
}

TEST(GainModel, KnowsLessTheFartherItIs) {
  const GainModel model(std::vector<Observation>{{.at = {}}});
  EXPECT_LT(model.at({0.2}).deviation, model.at({1}).deviation);
  EXPECT_LT(model.at({1}).deviation, model.at({1, 1, 1, 1, 1}).deviation);
}

TEST(GainModel, TakesTheMeanOfWhatDiffersByNoise) {
  const GainModel model(
      {{.at = {}, .log_gain = 0.1, .noise = 0.05}, {.at = {}, .log_gain = 0.2, .noise = 0.05}});
  EXPECT_NEAR(model.at({}).log_gain, 0.15, 0.01);
}

}  // namespace
}  // namespace trunkline::cli
