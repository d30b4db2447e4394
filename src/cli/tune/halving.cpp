#include "cli/tune/halving.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

#include "cli/bench/statistics.h"

namespace trunkline::cli {
namespace {

constexpr unsigned kCut = 3;                // one in three goes on
constexpr double kConfirmShare = 0.25;      // of the budget
constexpr double kCalibrationShare = 0.15;  // of the budget, at most
constexpr double kRepeatable = 0.05;        // a longer measurement pays while results differ by more
constexpr double kLongestFirst_s = 0.2;
constexpr unsigned kPairs = 3;      // of confirming
constexpr unsigned kFinalists = 3;  // that are confirmed, at most
constexpr std::size_t kFewest = 4;  // candidates, however short the budget
// Where gains are predicted: the share of the time for the first round, and the rounds after which predicted
// candidates come in.
constexpr double kFirstShare = 0.4;
constexpr unsigned kPredictions = 4;

// By how much measurements of the same differ, as a share.
double spread(const std::vector<PatternRates>& rates) {
  const PatternRates middle = median_of(rates);
  double most = 0;
  for (const PatternRates& each : rates) most = std::max(most, std::abs(gain(each, middle) - 1));
  return most;
}

// The same of the pattern that repeats worst.
double pattern_spread(const std::vector<PatternRates>& rates) {
  const PatternRates middle = median_of(rates);
  double most = 0;
  for (const PatternRates& each : rates) {
    for (std::size_t pattern = 0; pattern < each.size(); ++pattern)
      most = std::max(most, std::abs(each.at(pattern) / middle.at(pattern) - 1));
  }
  return most;
}

double smallest_ratio(const PatternRates& rates, const PatternRates& over) {
  double least = rates[0] / over[0];
  for (std::size_t pattern = 1; pattern < rates.size(); ++pattern)
    least = std::min(least, rates.at(pattern) / over.at(pattern));
  return least;
}

}  // namespace

bool is_better(const Standing& one, const Standing& other) {
  return one.gain != other.gain ? one.gain > other.gain : one.candidate < other.candidate;
}

double gain(const PatternRates& rates, const PatternRates& over) {
  double sum = 0;
  for (std::size_t pattern = 0; pattern < rates.size(); ++pattern)
    sum += std::log(rates.at(pattern) / over.at(pattern));
  return std::exp(sum / static_cast<double>(rates.size()));
}

PatternRates median_of(const std::vector<PatternRates>& rates) {
  PatternRates result{};
  for (std::size_t pattern = 0; pattern < result.size(); ++pattern) {
    std::vector<double> values;
    values.reserve(rates.size());
    for (const PatternRates& each : rates) values.push_back(each.at(pattern));
    result.at(pattern) = median(std::move(values));
  }
  return result;
}

double Halving::left_s() const { return terms_.budget_s * (1 - kConfirmShare) - now_(); }

Status Halving::calibrate() {
  constexpr int kRepeats = 3;
  seconds_ = terms_.first_s;
  while (true) {
    const double began = now_();
    std::vector<PatternRates> rates;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      auto measured = measure_(0, seconds_);
      if (!measured) return std::unexpected(measured.error());
      rates.push_back(*measured);
    }
    cost_s_ = std::max((now_() - began) / kRepeats, 1e-9);
    noise_ = std::max(spread(rates), terms_.least_noise);
    result_.rates = result_.defaults = median_of(rates);
    const bool is_late = now_() + 2 * kRepeats * cost_s_ > kCalibrationShare * terms_.budget_s;
    if (noise_ <= kRepeatable || seconds_ >= kLongestFirst_s || is_late) return {};
    seconds_ *= 2;
  }
}

unsigned Halving::rounds_left(std::size_t count) const {
  unsigned rounds = 1;
  for (; count > kCut; count = (count + kCut - 1) / kCut) ++rounds;
  const unsigned of_predictions = terms_.points.empty() ? 0 : kPredictions + 2;
  return std::max(rounds, of_predictions - std::min(of_predictions, round_));
}

// How many candidates can begin, if the first round measures each for seconds_, and takes its share.
std::size_t Halving::affordable() const {
  std::size_t count = terms_.distances.size() - 1;
  const auto share = [&] { return terms_.points.empty() ? 1.0 / rounds_left(count) : kFirstShare; };
  while (count > kFewest && static_cast<double>(count + 3) * cost_s_ > share() * left_s()) --count;
  return count;
}

// Those that differ from the defaults in one setting say most about all others.
std::vector<std::size_t> Halving::first_candidates() const {
  std::vector<std::size_t> order(terms_.distances.size() - 1);
  std::iota(order.begin(), order.end(), std::size_t{1});
  if (!terms_.points.empty()) {
    std::ranges::sort(order, {}, [this](std::size_t candidate) {
      return std::pair(terms_.distances[candidate] != 1, candidate);
    });
  }
  order.resize(affordable());
  return order;
}

// The candidates, none of which was measured, that are likeliest to be better than the best so far by more
// than the noise.
std::vector<std::size_t> Halving::promising(std::size_t most) const {
  if (terms_.points.empty() || round_ > kPredictions) return {};
  std::vector<Observation> observations{{.at = terms_.points.front(), .log_gain = 0, .noise = noise_}};
  std::vector<bool> is_measured(terms_.points.size());
  is_measured.front() = true;
  double best = 0;
  for (const Standing& each : result_.standings) {
    is_measured[each.candidate] = true;
    observations.push_back(
        {.at = terms_.points[each.candidate], .log_gain = std::log(each.gain), .noise = noise_});
    if (each.round == round_) best = std::max(best, std::log(each.gain));
  }
  const GainModel model(std::move(observations));
  std::vector<std::pair<double, std::size_t>> hopes;
  for (std::size_t candidate = 1; candidate < terms_.points.size(); ++candidate) {
    if (is_measured[candidate]) continue;
    const auto [log_gain, deviation] = model.at(terms_.points[candidate]);
    if (log_gain + deviation > best + noise_) hopes.emplace_back(-(log_gain + deviation), candidate);
  }
  std::ranges::sort(hopes);
  std::vector<std::size_t> chosen;
  for (const auto& [hope, candidate] : std::span(hopes).first(std::min(most, hopes.size())))
    chosen.push_back(candidate);
  return chosen;
}

// Compares with the defaults, and sorts.
void Halving::rank(std::vector<Standing>& standings, const std::vector<PatternRates>& defaults) const {
  const PatternRates reference = median_of(defaults);
  for (Standing& each : standings) each.gain = gain(each.rates, reference);
  std::ranges::sort(standings, is_better);
}

// 0 in `order` is the defaults, which come up several times. Ends when the time is over, with what was
// measured by then.
Status Halving::measure_round(const std::vector<std::size_t>& order, std::vector<Standing>& standings) {
  std::vector<PatternRates> defaults;
  const double began = now_();
  std::size_t measured = 0;
  for (const std::size_t candidate : order) {
    if (measured > 0 && left_s() < 0) break;
    auto rates = measure_(candidate, seconds_);
    if (!rates) return std::unexpected(rates.error());
    ++measured;
    if (candidate == 0)
      defaults.push_back(*rates);
    else
      standings.push_back({.candidate = candidate, .round = round_, .seconds = seconds_, .rates = *rates});
    rank(standings, defaults);
    show_(standings, round_, noise_);
  }
  cost_s_ = (now_() - began) / static_cast<double>(measured);
  if (defaults.size() > 1) noise_ = std::max(spread(defaults), terms_.least_noise);
  result_.rates = result_.defaults = median_of(defaults);
  return {};
}

Status Halving::round() {
  ++round_;
  const double share_s = left_s() / rounds_left(survivors_.size());
  const double longer = share_s / (static_cast<double>(survivors_.size() + 3) * cost_s_);
  if (round_ > 1 && longer > 1) {
    seconds_ *= longer;
    cost_s_ *= longer;
  }
  std::vector<std::size_t> order = survivors_;
  std::ranges::shuffle(order, random_);
  order.insert(order.begin(), 0);
  order.insert(order.begin() + static_cast<std::ptrdiff_t>(order.size() / 2), 0);
  order.push_back(0);
  std::vector<Standing> standings;
  if (auto status = measure_round(order, standings); !status) return status;
  remember(standings);
  cut(standings);
  return {};
}

void Halving::remember(const std::vector<Standing>& standings) {
  std::erase_if(result_.standings, [&](const Standing& old) {
    return std::ranges::find(standings, old.candidate, &Standing::candidate) != standings.end();
  });
  result_.standings.insert(result_.standings.begin(), standings.begin(), standings.end());
}

void Halving::cut(const std::vector<Standing>& standings) {
  last_ = standings;
  if (standings.empty() || left_s() < 0) {
    ended_ = true;
    result_.why = "the budget is spent";
    return;
  }
  const std::size_t keep = (standings.size() + kCut - 1) / kCut;
  survivors_.clear();
  for (const Standing& each : std::span(standings).first(keep)) survivors_.push_back(each.candidate);
  const std::vector<std::size_t> better = promising(keep / 2 + 1);
  survivors_.insert(survivors_.end(), better.begin(), better.end());
  if (!better.empty()) return;
  const double best = standings.front().gain;
  if (is_settled() && best <= 1 + noise_) {
    ended_ = true;
    result_.why = "no candidate is faster than the defaults by more than the noise";
  } else if (is_settled() && standings[keep - 1].gain * (1 + noise_) >= best) {
    ended_ = true;
    result_.why = "the differences between the best are within the noise";
  } else if (keep == 1) {
    ended_ = true;
    result_.why = "one candidate is left";
  }
}

// The best first; among those within the noise of it, the closest to the defaults.
std::vector<Standing> Halving::finalists() const {
  std::vector<Standing> ordered = last_;
  if (ordered.empty()) return ordered;
  const double tied = ordered.front().gain / (1 + noise_);
  const auto end = std::ranges::find_if(ordered, [&](const Standing& each) { return each.gain < tied; });
  std::ranges::sort(ordered.begin(), end, [this](const Standing& one, const Standing& other) {
    const unsigned near = terms_.distances[one.candidate];
    const unsigned far = terms_.distances[other.candidate];
    return near != far ? near < far : is_better(one, other);
  });
  if (ordered.size() > kFinalists) ordered.resize(kFinalists);
  return ordered;
}

Result<bool> Halving::confirm(const Standing& finalist, unsigned finalists_left) {
  const double left = (terms_.budget_s - now_()) / std::min(finalists_left, 2U);
  const double seconds = std::max(terms_.first_s, seconds_ * left / (2 * kPairs * cost_s_));
  std::vector<PatternRates> ours;
  std::vector<PatternRates> defaults;
  for (unsigned pair = 0; pair < kPairs; ++pair) {
    for (const bool is_default : {true, false}) {
      auto rates = measure_(is_default ? 0 : finalist.candidate, std::min(seconds, 2.0));
      if (!rates) return std::unexpected(rates.error());
      (is_default ? defaults : ours).push_back(*rates);
    }
  }
  noise_ = std::max(spread(defaults), terms_.least_noise);
  const PatternRates middle = median_of(ours);
  const PatternRates reference = median_of(defaults);
  result_.defaults = result_.rates = reference;
  const double gained = gain(middle, reference);
  const double slower = std::max(pattern_spread(defaults), terms_.least_noise);
  if (gained <= 1 + noise_ || smallest_ratio(middle, reference) < 1 - slower) return false;
  result_.best = finalist.candidate;
  result_.gain = gained;
  result_.rates = middle;
  return true;
}

Result<HalvingResult> Halving::run() {
  if (auto status = calibrate(); !status) return std::unexpected(status.error());
  if (terms_.distances.size() > 1) survivors_ = first_candidates();
  if (survivors_.empty()) result_.why = "there is nothing to choose from";
  while (!ended_ && !survivors_.empty()) {
    if (auto status = round(); !status) return std::unexpected(status.error());
  }
  unsigned left = 0;
  bool is_refuted = false;
  const std::vector<Standing> ordered = finalists();
  for (const Standing& each : ordered) left += each.gain > 1 + noise_ ? 1 : 0;
  for (const Standing& each : ordered) {
    if (each.gain <= 1 + noise_ || left == 0) continue;
    const auto confirmed = confirm(each, left--);
    if (!confirmed) return std::unexpected(confirmed.error());
    if (*confirmed) break;
    is_refuted = true;
    if (now_() > terms_.budget_s) break;
  }
  if (is_refuted && result_.best == 0)
    result_.why = "no candidate was faster than the defaults when both were measured in turns";
  result_.noise = noise_;
  return std::move(result_);
}

}  // namespace trunkline::cli
