// Finds the fastest of many candidates by successive halving (Jamieson and Talwalkar, "Non-stochastic Best
// Arm Identification and Hyperparameter Optimization", AISTATS 2016): some are measured briefly, the better
// third longer, and so on. To each round those come that a model of the gains predicts to be better. What is
// measured, and how, is the caller's.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cli/tune/gain_model.h"
#include "trunkline/error.h"
#include "tuning/tuning.h"

namespace trunkline::cli {

using PatternRates = std::array<double, tuning::kPatterns>;  // bytes per second

// The geometric mean of the ratios of the patterns: 1.1 where all are 10 % faster.
double gain(const PatternRates& rates, const PatternRates& over);

// Of each pattern.
PatternRates median_of(const std::vector<PatternRates>& rates);

// A candidate as it was measured most recently.
struct Standing {
  std::size_t candidate = 0;
  unsigned round = 0;  // from 1
  double seconds = 0;  // that each pattern was measured
  double gain = 1;     // over the defaults in the same round
  PatternRates rates{};
};

// The order of standings: by gain, and where that is the same by number.
bool is_better(const Standing& one, const Standing& other);

struct HalvingResult {
  std::size_t best = 0;             // 0: the defaults
  double gain = 1;                  // of the best over the defaults
  double noise = 0;                 // by which measurements of the same differ, as a share
  PatternRates rates{};             // of the best ...
  PatternRates defaults{};          // ... and of the defaults, measured in turns with it
  std::string why;                  // why it ended, a phrase
  std::vector<Standing> standings;  // of all that were measured, best first
};

struct HalvingTerms {
  std::vector<unsigned> distances = {};  // of each candidate from the defaults, which are the first: 0
  std::vector<Point> points = {};        // of each candidate; none: nothing is predicted
  double budget_s = 60;
  double least_noise = 0.02;  // differences below that do not count, however well they repeat
  double first_s = 0.05;      // what each pattern is measured at first
};

class Halving {
 public:
  // Measures each pattern for about `seconds`.
  using Measure = std::function<Result<PatternRates>(std::size_t candidate, double seconds)>;
  using Seconds = std::function<double()>;  // since the begin
  // After each measurement: the candidates that are still in, as measured so far, best first.
  using Show = std::function<void(const std::vector<Standing>& standings, unsigned round, double noise)>;

  Halving(HalvingTerms terms, Measure measure, Seconds now, Show show)
      : terms_(std::move(terms)),
        measure_(std::move(measure)),
        now_(std::move(now)),
        show_(std::move(show)) {}

  // 1. Calibrates: how long a measurement must be for its result to repeat.
  // 2. Rounds, the first with the neighbours of the defaults and as many others as there is time for. The
  //    better third goes on, and with it unmeasured candidates that may be better still. The defaults are in
  //    each of them, several times, and everything is compared with them, so that a drift of the machine
  //    favours nobody. What they differ among themselves is the noise.
  // 3. Confirms: the best is measured in turns with the defaults. It wins only if it is faster by more than
  //    the noise, and slower in no pattern by more than that.
  // Ends early where the differences are within the noise. Of candidates within the noise of the best, the
  // one closest to the defaults is preferred.
  Result<HalvingResult> run();

 private:
  Status calibrate();
  Status round();
  Status measure_round(const std::vector<std::size_t>& order, std::vector<Standing>& standings);
  void rank(std::vector<Standing>& standings, const std::vector<PatternRates>& defaults) const;
  void cut(const std::vector<Standing>& standings);
  std::vector<std::size_t> first_candidates() const;
  std::vector<std::size_t> promising(std::size_t most) const;
  Result<bool> confirm(const Standing& finalist, unsigned finalists_left);
  std::vector<Standing> finalists() const;
  std::size_t affordable() const;
  unsigned rounds_left(std::size_t count) const;
  double left_s() const;
  void remember(const std::vector<Standing>& standings);
  bool is_settled() const { return noise_ <= 2 * terms_.least_noise; }

  const HalvingTerms terms_;
  const Measure measure_;
  const Seconds now_;
  const Show show_;
  std::mt19937 random_{1};              // NOLINT(cert-msc51-cpp): the same each time
  std::vector<std::size_t> survivors_;  // without the defaults
  std::vector<Standing> last_;          // of the most recent round, best first
  double seconds_ = 0;                  // of a measurement of one pattern
  double cost_s_ = 0;                   // of measuring one candidate, over all patterns
  double noise_ = 0;
  unsigned round_ = 0;
  bool ended_ = false;
  HalvingResult result_;
};

}  // namespace trunkline::cli
