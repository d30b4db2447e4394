#include "cli/tune/gain_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace trunkline::cli {
namespace {

// Of gains, as logarithms: settings change rates by tens of per cent, and poor ones divide them.
constexpr double kDeviation = 0.45;
// Of the variance: what each setting does by itself; the rest depends on all of them together.
constexpr double kAdditiveShare = 0.7;

double covariance(const Point& one, const Point& other) {
  double sum = 0;
  double apart = 0;
  for (std::size_t setting = 0; setting < one.size(); ++setting) {
    const double step = std::abs(one.at(setting) - other.at(setting));
    sum += std::exp(-step);
    apart += step;
  }
  const double additive = sum / static_cast<double>(one.size());
  return kDeviation * kDeviation * (kAdditiveShare * additive + (1 - kAdditiveShare) * std::exp(-apart));
}

}  // namespace

GainModel::GainModel(std::vector<Observation> observations) : observations_(std::move(observations)) {
  const std::size_t count = observations_.size();
  triangle_.assign(count, std::vector<double>(count));
  for (std::size_t row = 0; row < count; ++row) {
    for (std::size_t column = 0; column <= row; ++column) {
      const auto& left = triangle_[row];
      const auto& right = triangle_[column];
      double rest = covariance(observations_[row].at, observations_[column].at) -
                    std::inner_product(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(column),
                                       right.begin(), 0.0);
      if (row == column) {
        const double noise = observations_[row].noise;
        rest = std::sqrt(std::max(rest + noise * noise, 1e-9));
      } else {
        rest /= right[column];
      }
      triangle_[row][column] = rest;
    }
  }
  std::vector<double> gains;
  gains.reserve(count);
  for (const Observation& each : observations_) gains.push_back(each.log_gain);
  scaled_ = solve(std::move(gains));
}

std::vector<double> GainModel::solve(std::vector<double> values) const {
  for (std::size_t row = 0; row < values.size(); ++row) {
    const auto& factors = triangle_[row];
    values[row] -= std::inner_product(factors.begin(), factors.begin() + static_cast<std::ptrdiff_t>(row),
                                      values.begin(), 0.0);
    values[row] /= factors[row];
  }
  return values;
}

GainModel::Prediction GainModel::at(const Point& point) const {
  std::vector<double> with;
  with.reserve(observations_.size());
  for (const Observation& each : observations_) with.push_back(covariance(point, each.at));
  const std::vector<double> scaled = solve(std::move(with));
  const double known = std::inner_product(scaled.begin(), scaled.end(), scaled.begin(), 0.0);
  return {.log_gain = std::inner_product(scaled.begin(), scaled.end(), scaled_.begin(), 0.0),
          .deviation = std::sqrt(std::max(0.0, covariance(point, point) - known))};
}

}  // namespace trunkline::cli
