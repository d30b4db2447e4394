// The search on simulated disks, where the best of all candidates is known.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <ranges>
#include <string>

#include "cli/tune/candidates.h"
#include "cli/tune/halving.h"
#include "cli/tune/trial_bench.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

struct Disk {
  std::string name;
  double read = 1e9;  // bytes per second, at most
  double write = 1e9;
  double latency = 1e-4;  // seconds of a command
  double deepest = 1e9;   // commands in flight, beyond which it becomes slower
  double copy = 8e9;      // bytes per second of a core, through the page cache
  double bounce = 1e12;   // the same of direct I/O
};

double command_s(BackendKind backend) {
  if (backend == BackendKind::io_uring) return 3e-6;
  return backend == BackendKind::libaio ? 4e-6 : 15e-6;
}

double rate(const Disk& disk, const Candidate& candidate, std::size_t pattern, unsigned cores) {
  const auto [op, order] = pattern_at(pattern);
  const auto block = static_cast<double>(order == Order::sequential ? candidate.block_bytes : kRandomBytes);
  const double in_flight = candidate.lanes * candidate.queue_depth;
  const double limit = op == Op::read ? disk.read : disk.write;
  const double through_copies = candidate.direct ? disk.bounce : disk.copy;
  const double lane = block / (command_s(candidate.backend) + block / through_copies);
  const double processors = lane * std::min(candidate.lanes, cores);
  const double waiting = in_flight * block / (disk.latency + block / limit);
  const double crowded = in_flight > disk.deepest ? std::pow(disk.deepest / in_flight, 0.2) : 1;
  return crowded / (1 / limit + 1 / processors + 0.2 / waiting);
}

// The rate of the choice, over that of the best of all that are slower than the defaults in no pattern.
double quality(const Disk& disk, unsigned cores, unsigned seed, double share_of_grid) {
  constexpr double kOverhead_s = 0.1;  // of a measurement: engines, opening, syncing
  constexpr double kEach_s = 0.25;     // that a grid search measures each pattern
  const std::vector<Candidate> all =
      candidates({.defaults = {BackendKind::io_uring, std::min(cores, 4U), 32, 4 * kMiB, true},
                  .backends = {BackendKind::io_uring, BackendKind::libaio, BackendKind::threads},
                  .cores = cores});
  std::vector<PatternRates> rates;
  HalvingTerms terms;
  for (const Candidate& each : all) {
    rates.emplace_back();
    for (std::size_t pattern = 0; pattern < tuning::kPatterns; ++pattern)
      rates.back().at(pattern) = rate(disk, each, pattern, cores);
    terms.distances.push_back(distance(each, all.front()));
    terms.points.push_back(point_of(each));
  }
  double now = 0;
  std::mt19937 random(seed);
  const auto measure = [&](std::size_t candidate, double seconds) -> Result<PatternRates> {
    PatternRates measured = rates.at(candidate);
    std::normal_distribution<double> noise(1, 0.03 * std::sqrt(0.05 / seconds));
    for (double& each : measured) each *= noise(random);
    now += tuning::kPatterns * seconds + kOverhead_s;
    return measured;
  };
  terms.budget_s =
      share_of_grid * static_cast<double>(all.size()) * (tuning::kPatterns * kEach_s + kOverhead_s);
  const auto result =
      Halving(terms, measure, [&] { return now; }, [](const auto&, unsigned, double) {}).run();
  double best = 1;
  for (const PatternRates& each : rates) {
    const bool is_slower = std::ranges::any_of(std::views::iota(0U, tuning::kPatterns), [&](auto pattern) {
      return each.at(pattern) < 0.98 * rates[0].at(pattern);
    });
    if (!is_slower) best = std::max(best, gain(each, rates[0]));
  }
  EXPECT_LE(now, terms.budget_s + 2) << disk.name;
  const double chosen = gain(rates[result->best], rates[0]);
  EXPECT_GE(chosen, 0.98) << disk.name;
  return chosen / best;
}

TEST(Search, FindsNearlyTheBestInATenthOfTheTimeOfAllCandidates) {
  for (const Disk& disk : std::vector<Disk>{
           {.name = "paced", .bounce = 4e9},
           {.name = "NVMe", .read = 7e9, .write = 5e9, .latency = 8e-5},
           {.name = "SATA", .read = 5e8, .write = 4.5e8, .latency = 2e-4, .deepest = 32},
           {.name = "slow copies", .read = 4e9, .write = 4e9, .copy = 1e9, .bounce = 2e9},
           {.name = "cache", .read = 2e9, .write = 2e9, .copy = 2e10, .bounce = 2e9},
           {.name = "network", .read = 3e9, .write = 3e9, .latency = 5e-3},
       }) {
    for (const unsigned cores : {2U, 16U}) {
      double worst = 1;
      double sum = 0;
      for (unsigned seed = 1; seed <= 10; ++seed) {
        const double found = quality(disk, cores, seed, 0.1);
        worst = std::min(worst, found);
        sum += found / 10;
      }
      EXPECT_GE(sum, 0.97) << disk.name << ", " << cores << " cores";
      EXPECT_GE(worst, 0.95) << disk.name << ", " << cores << " cores";
    }
  }
}

}  // namespace
}  // namespace trunkline::cli
