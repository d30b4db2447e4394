// Predicts the gains of candidates from those that were measured: a Gaussian process (Rasmussen and Williams,
// "Gaussian Processes for Machine Learning", 2006). Candidates with similar settings have similar gains, and
// part of what a setting changes is the same whatever the others are.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace trunkline::cli {

// A candidate's settings as coordinates: 1 apart is a difference that matters.
using Point = std::array<double, 5>;

struct Observation {
  Point at{};
  double log_gain = 0;
  double noise = 0;  // standard deviation of log_gain
};

class GainModel {
 public:
  // At least one observation; of the defaults, whose gain is 1, too.
  explicit GainModel(std::vector<Observation> observations);

  struct Prediction {
    double log_gain = 0;
    double deviation = 0;  // standard deviation
  };
  Prediction at(const Point& point) const;

 private:
  std::vector<double> solve(std::vector<double> values) const;  // with the lower triangle only

  std::vector<Observation> observations_;
  std::vector<std::vector<double>> triangle_;  // Cholesky factor of the covariances
  std::vector<double> scaled_;                 // solve(the log gains)
};

}  // namespace trunkline::cli
