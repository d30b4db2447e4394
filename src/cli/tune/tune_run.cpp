#include "cli/tune/tune_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "cli/bench/meter.h"
#include "cli/tune/scratch_files.h"
#include "cli/tune/trial_bench.h"
#include "cli/tune/tune_display.h"
#include "io/engine_core.h"
#include "os/topology.h"
#include "tuning/storage.h"

namespace trunkline::cli {
namespace {

constexpr double kLayoutShare = 0.2;     // of the budget, at most
constexpr unsigned kDefaultsEvery = 10;  // candidates of an exhaustive search

std::vector<BackendKind> working_backends() {
  std::vector<BackendKind> found;
  for (const BackendKind kind : kKernelBackends) {
    if (Engine::create({.backend = kind, .lanes = 1})) found.push_back(kind);
  }
  return found;
}

// Whether direct I/O works on a file, and whether it is the default where it is.
struct DirectIo {
  bool works = false;
  bool is_default = false;
};
Result<DirectIo> direct_io(const ScratchFiles& files) {
  auto engine = Engine::create({.lanes = 1});
  if (!engine) return std::unexpected(engine.error());
  DirectIo found{.works = true, .is_default = true};
  for (const std::string& path : files.paths()) {
    const auto location = os::locate(path);
    if (!location) return std::unexpected(location.error());
    found.works &=
        File::open(*engine, path, {.mode = Mode::read_write, .direct = Direct::always}).has_value();
    found.is_default &= !location->network && !location->in_memory;
  }
  found.is_default &= found.works;
  return found;
}

Result<Choices> choices_for(const ScratchFiles& files) {
  const auto direct = direct_io(files);
  if (!direct) return std::unexpected(direct.error());
  const auto config = io::resolve({});
  if (!config) return std::unexpected(config.error());
  Choices choices{.backends = working_backends(),
                  .cores = std::max(1U, std::thread::hardware_concurrency()),
                  .can_be_direct = direct->works};
  if (choices.backends.empty())
    return std::unexpected(make_error(ErrorKind::unsupported, "no backend works here; see trunkline doctor"));
  choices.defaults = {.backend = choices.backends.front(),
                      .lanes = config->lanes,
                      .queue_depth = config->queue_depth,
                      .block_bytes = config->block_bytes,
                      .direct = direct->is_default};
  return choices;
}

// Every candidate for the same time, in the order of the list, which has no pattern; the defaults in between.
Result<HalvingResult> search_all(const std::vector<Candidate>& candidates, double seconds,
                                 const Halving::Measure& measure, const Halving::Show& show) {
  HalvingResult result;
  result.why = "every candidate was measured";
  std::vector<PatternRates> defaults;
  for (std::size_t candidate = 1; candidate < candidates.size(); ++candidate) {
    if (candidate % kDefaultsEvery == 1) {
      auto rates = measure(0, seconds);
      if (!rates) return std::unexpected(rates.error());
      defaults.push_back(*rates);
      result.defaults = median_of(defaults);
    }
    auto rates = measure(candidate, seconds);
    if (!rates) return std::unexpected(rates.error());
    result.standings.push_back({.candidate = candidate, .round = 1, .seconds = seconds, .rates = *rates});
    for (Standing& each : result.standings) each.gain = gain(each.rates, result.defaults);
    std::ranges::sort(result.standings, is_better);
    show(result.standings, 1, 0);
  }
  result.rates = result.defaults;
  if (!result.standings.empty() && result.standings.front().gain > 1) {
    result.best = result.standings.front().candidate;
    result.gain = result.standings.front().gain;
    result.rates = result.standings.front().rates;
  }
  return result;
}

}  // namespace

Result<TuneResult> run_tune(const TuneOptions& options, std::ostream& out, bool terminal) {
  ::setenv("TRUNKLINE_TUNING", "off", 1);  // NOLINT(concurrency-mt-unsafe): no other thread runs yet
  const auto began = Clock::now();
  const auto now = [began] { return seconds_between(began, Clock::now()); };
  TuneResult result;
  const auto size = scratch_bytes(options.paths, options.size_bytes);
  if (!size) return std::unexpected(size.error());
  auto storages = tuning::storages_of(options.paths);
  if (!storages) return std::unexpected(storages.error());
  result.storages = std::move(*storages);
  auto files = ScratchFiles::create(options.paths);
  if (!files) return std::unexpected(files.error());
  const auto choices = choices_for(*files);
  if (!choices) return std::unexpected(choices.error());
  result.candidates = candidates(*choices);

  auto bench = TrialBench::create(*files);
  if (!bench) return std::unexpected(bench.error());
  Progress progress(out, terminal);
  progress.begin("writing a scratch file", *size * options.paths.size(), 0, Clock::now());
  const auto wrote = [&](std::uint64_t bytes) { progress.update(bytes, Clock::now()); };
  const Status laid_out = bench->lay_out(choices->defaults, *size, kLayoutShare * options.budget_s, wrote);
  progress.end();
  if (!laid_out) return std::unexpected(laid_out.error());
  result.file_bytes = bench->file_bytes();

  TuneDisplay display(out, terminal, result.candidates);
  const Halving::Measure measure = [&](std::size_t candidate, double seconds) {
    return bench->measure(result.candidates[candidate], seconds);
  };
  const Halving::Show show = [&](const std::vector<Standing>& standings, unsigned round, double noise) {
    display.show(standings, round, noise, now(), options.budget_s);
  };
  HalvingTerms terms{.distances = {}, .points = {}, .budget_s = options.budget_s};
  for (const Candidate& each : result.candidates) {
    terms.distances.push_back(distance(each, choices->defaults));
    terms.points.push_back(point_of(each));
  }
  auto found = options.exhaustive_s > 0 ? search_all(result.candidates, options.exhaustive_s, measure, show)
                                        : Halving(std::move(terms), measure, now, show).run();
  display.end();
  if (!found) return std::unexpected(found.error());
  result.halving = std::move(*found);
  result.seconds = now();
  return result;
}

}  // namespace trunkline::cli
