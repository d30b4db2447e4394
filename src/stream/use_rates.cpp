#include "stream/use_rates.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace trunkline {
namespace {

// Weights of the newest token in each average.
constexpr std::array<double, 4> kNewest{1.0, 1.0 / 8, 1.0 / 64, 1.0 / 1024};
// Weights of the averages before anything is learnt, and how much they resist it.
constexpr std::array<double, 4> kPrior{0.0, 0.0, 1.0, 1.0};
constexpr double kResistance = 1.0;
// What remains of what was learnt after each step of a group.
constexpr double kMemory = 1.0 - 1.0 / 4096;

}  // namespace

UseRates::UseRates(std::vector<std::size_t> groups)
    : units_(groups.empty() ? 0 : std::ranges::max(groups) + 1),
      shares_(groups.size()),
      averages_(groups.size()),
      rates_(groups.size()),
      weights_(kPrior) {
  for (std::size_t unit = 0; unit < groups.size(); ++unit) units_[groups[unit]].push_back(unit);
}

void UseRates::record(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens) {
  if (tokens == 0) return;
  for (const UnitUse& use : uses)
    shares_[use.unit] = std::min(1.0, static_cast<double>(use.tokens) / static_cast<double>(tokens));
  for (Averages& row : products_) {
    for (double& product : row) product *= kMemory;
  }
  for (double& target : targets_) target *= kMemory;
  for (const std::size_t unit : units_[group]) learn(averages_[unit], shares_[unit]);
  fit();

  Averages kept{};
  for (std::size_t i = 0; i < kAverages; ++i) kept[i] = std::pow(1 - kNewest[i], static_cast<double>(tokens));
  for (const std::size_t unit : units_[group]) {
    const double share = std::exchange(shares_[unit], 0.0);
    rates_[unit] = 0;
    for (std::size_t i = 0; i < kAverages; ++i) {
      averages_[unit][i] = averages_[unit][i] * kept[i] + share * (1 - kept[i]);
      rates_[unit] += weights_[i] * averages_[unit][i];
    }
  }
}

std::vector<double> UseRates::long_run() const {
  std::vector<double> found;
  found.reserve(averages_.size());
  for (const Averages& averages : averages_) found.push_back(averages.back());
  return found;
}

void UseRates::restore(std::span<const double> long_run) {
  for (std::size_t unit = 0; unit < averages_.size(); ++unit) {
    rates_[unit] = 0;
    for (std::size_t i = 0; i < kAverages; ++i) {
      // Averages without a prior weight are of what is popular now, which is not known.
      averages_[unit][i] = kPrior[i] > 0 ? long_run[unit] : 0;
      rates_[unit] += weights_[i] * averages_[unit][i];
    }
  }
}

void UseRates::learn(const Averages& averages, double share) {
  for (std::size_t i = 0; i < kAverages; ++i) {
    for (std::size_t j = 0; j < kAverages; ++j) products_[i][j] += averages[i] * averages[j];
    targets_[i] += averages[i] * share;
  }
}

// Solves the normal equations, with kPrior as if it had been learnt kResistance times, by elimination: the
// matrix is symmetric and positive definite.
void UseRates::fit() {
  auto matrix = products_;
  Averages right = targets_;
  for (std::size_t i = 0; i < kAverages; ++i) {
    matrix[i][i] += kResistance;
    right[i] += kResistance * kPrior[i];
  }
  for (std::size_t pivot = 0; pivot < kAverages; ++pivot) {
    for (std::size_t row = pivot + 1; row < kAverages; ++row) {
      const double factor = matrix[row][pivot] / matrix[pivot][pivot];
      for (std::size_t column = pivot; column < kAverages; ++column)
        matrix[row][column] -= factor * matrix[pivot][column];
      right[row] -= factor * right[pivot];
    }
  }
  for (std::size_t row = kAverages; row-- > 0;) {
    for (std::size_t column = row + 1; column < kAverages; ++column)
      right[row] -= matrix[row][column] * weights_[column];
    weights_[row] = right[row] / matrix[row][row];
  }
}

}  // namespace trunkline
