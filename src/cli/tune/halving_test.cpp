#include "cli/tune/halving.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

namespace trunkline::cli {
namespace {

// Candidates whose rates are known, on a clock that only measuring advances.
struct World {
  std::vector<PatternRates> rates;    // of each candidate
  std::vector<unsigned> distances{};  // empty: 1 for all but the defaults
  double budget_s = 60;
  double noise = 0;  // at 50 ms; it falls with the square root of the time
  double drift = 0;  // by which everything becomes slower in each second, as a share

  HalvingResult run() {
    if (distances.empty()) {
      distances.assign(rates.size(), 1);
      distances.front() = 0;
    }
    const Halving::Measure measure = [this](std::size_t candidate, double seconds) -> Result<PatternRates> {
      PatternRates measured = rates.at(candidate);
      for (double& each : measured) each *= wobble(seconds) * std::exp(-drift * now);
      now += 4 * seconds;
      total_s[candidate] += seconds;
      return measured;
    };
    Halving halving(
        {.distances = distances, .budget_s = budget_s}, measure, [this] { return now; },
        [](const auto&, unsigned, double) {});
    return *halving.run();
  }

  double wobble(double seconds) {
    const double amplitude = noise * std::sqrt(0.05 / seconds);
    return 1 + amplitude * (2 * std::generate_canonical<double, 53>(random) - 1);
  }

  double now = 0;
  std::map<std::size_t, double> total_s{};  // that each candidate was measured
  std::mt19937 random{7};
};

PatternRates all(double rate) { return {rate, rate, rate, rate}; }

std::vector<PatternRates> alike(std::size_t count) { return std::vector(count, all(1e9)); }

TEST(Halving, FindsTheFastestOfMany) {
  World world{.rates = alike(150)};
  for (std::size_t index = 1; index < world.rates.size(); ++index)
    world.rates[index] = all(1e9 * (0.5 + static_cast<double>(index % 97) / 100));
  world.rates[30] = all(2e9);
  const HalvingResult result = world.run();
  EXPECT_EQ(result.best, 30U);
  EXPECT_NEAR(result.gain, 2, 0.01);
  EXPECT_DOUBLE_EQ(result.rates[0], 2e9);
  EXPECT_DOUBLE_EQ(result.defaults[0], 1e9);
  EXPECT_EQ(result.standings.front().candidate, 30U);
  EXPECT_LE(world.now, 61);
  // The better they are, the longer they are measured.
  EXPECT_GT(world.total_s[30], 3 * world.total_s[1]);
}

TEST(Halving, FindsItThroughNoiseAndDrift) {
  World world{.rates = alike(60), .noise = 0.1, .drift = 0.02};
  world.rates[41] = all(1.4e9);
  EXPECT_EQ(world.run().best, 41U);
}

TEST(Halving, EndsEarlyWhereNothingDiffers) {
  World world{.rates = alike(100)};
  const HalvingResult result = world.run();
  EXPECT_EQ(result.best, 0U);
  EXPECT_EQ(result.gain, 1);
  EXPECT_NE(result.why.find("noise"), std::string::npos) << result.why;
  EXPECT_LT(world.now, 30);
}

TEST(Halving, LetsTheDefaultsWinTies) {
  World world{.rates = alike(30)};
  world.rates[7] = all(1.015e9);  // less than the least noise
  EXPECT_EQ(world.run().best, 0U);
}

TEST(Halving, PrefersTheClosestToTheDefaultsOfThoseThatAreAlike) {
  World world{.rates = alike(30)};
  world.distances.assign(30, 4);
  world.distances[0] = 0;
  world.distances[9] = 1;
  for (const std::size_t index : {3U, 9U, 20U}) world.rates[index] = all(1.5e9);
  world.rates[20] = all(1.51e9);
  EXPECT_EQ(world.run().best, 9U);
}

TEST(Halving, NeverChoosesWhatIsSlowerInOnePattern) {
  World world{.rates = alike(12)};
  world.rates[5] = {4e9, 4e9, 4e9, 0.9e9};
  world.rates[8] = all(1.2e9);
  EXPECT_EQ(world.run().best, 8U);
  world = World{.rates = alike(12)};
  world.rates[5] = {4e9, 4e9, 4e9, 0.9e9};
  const HalvingResult result = world.run();
  EXPECT_EQ(result.best, 0U);
  EXPECT_NE(result.why.find("measured in turns"), std::string::npos) << result.why;
}

TEST(Halving, MeasuresLongerWhereResultsDoNotRepeat) {
  World steady{.rates = alike(20)};
  World noisy{.rates = alike(20), .noise = 0.4};
  EXPECT_EQ(steady.run().best, 0U);
  noisy.run();
  EXPECT_GT(noisy.total_s[0], steady.total_s[0]);
}

TEST(Halving, KeepsToAShortBudget) {
  World world{.rates = alike(150), .budget_s = 5};
  world.rates[2] = all(3e9);
  const HalvingResult result = world.run();
  EXPECT_LT(world.now, 6);
  EXPECT_LT(result.standings.size(), 100U);  // a sample of them
}

TEST(Halving, PassesErrorsOn) {
  Halving halving(
      {.distances = {0, 1}},
      [](std::size_t, double) -> Result<PatternRates> {
        return std::unexpected(make_error(ErrorKind::cancelled, "interrupted"));
      },
      [] { return 0.0; }, [](const auto&, unsigned, double) {});
  EXPECT_EQ(halving.run().error().kind, ErrorKind::cancelled);
}

TEST(Halving, WithoutChoiceReportsTheDefaults) {
  World world{.rates = alike(1)};
  const HalvingResult result = world.run();
  EXPECT_EQ(result.best, 0U);
  EXPECT_EQ(result.defaults, all(1e9));
}

TEST(Gain, IsTheGeometricMean) {
  EXPECT_DOUBLE_EQ(gain({4, 1, 1, 4}, {1, 1, 1, 1}), 2);
  EXPECT_EQ(median_of({all(1), all(5), all(3)}), all(3));
}

}  // namespace
}  // namespace trunkline::cli
