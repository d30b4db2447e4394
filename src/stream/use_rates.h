// How often units are used, estimated from the steps of their groups. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "trunkline/unit_cache.h"

namespace trunkline {

// A unit's rate estimates the probability that the next token of its group uses it. It is a weighted sum of
// exponential moving averages over the group's tokens: fast ones for what is popular now, slow ones for what
// is popular throughout. How much each of them says differs among routers and texts, so the weights are
// fitted, by least squares, to how well the averages predicted earlier steps of all groups. Since only tokens
// of its own group count, a unit is not worth less because other groups were used after it. Not synchronised.
class UseRates {
 public:
  // `groups`: of each unit.
  explicit UseRates(std::vector<std::size_t> groups);

  // `tokens` tokens of the group used these of its units, and none of the others.
  void record(std::size_t group, std::span<const UnitUse> uses, std::uint64_t tokens);

  double rate(std::size_t unit) const { return rates_[unit]; }

  // What is known of each unit in the long run, to be restored in another process.
  std::vector<double> long_run() const;
  // Begins with the averages that long_run() returned, of as many units.
  void restore(std::span<const double> long_run);

 private:
  static constexpr std::size_t kAverages = 4;
  using Averages = std::array<double, kAverages>;

  void learn(const Averages& averages, double share);
  void fit();

  std::vector<std::vector<std::size_t>> units_;  // of each group
  std::vector<double> shares_;                   // by unit: of the tokens of a step; zero between steps
  std::vector<Averages> averages_;               // by unit
  std::vector<double> rates_;                    // by unit
  Averages weights_;
  // The normal equations of the fit: sums over what was learnt, of which older steps count less.
  std::array<Averages, kAverages> products_{};
  Averages targets_{};
};

}  // namespace trunkline
