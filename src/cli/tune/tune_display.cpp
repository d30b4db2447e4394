#include "cli/tune/tune_display.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/text_table.h"
#include "trunkline/units.h"
#include "tuning/tuning.h"

namespace trunkline::cli {
namespace {

constexpr std::size_t kRows = 8;

std::string percent(double gain) { return fmt::format("{:+.1f} %", 100 * (gain - 1)); }

}  // namespace

std::string describe(const Candidate& candidate) {
  return tuning::to_string({.backend = candidate.backend,
                            .lanes = candidate.lanes,
                            .queue_depth = candidate.queue_depth,
                            .block_bytes = candidate.block_bytes,
                            .direct = candidate.direct});
}

void TuneDisplay::end() {
  if (lines_ > 0) out_ << fmt::format("\033[{}F\033[J", lines_) << std::flush;
  lines_ = 0;
}

void TuneDisplay::show(const std::vector<Standing>& standings, unsigned round, double noise, double seconds,
                       double budget_s) {
  const std::string title = fmt::format("noise {:.1f} %, {:.0f} of {:.0f} s", 100 * noise, seconds, budget_s);
  if (!terminal_) {
    if (round == round_) return;
    round_ = round;
    out_ << fmt::format("round {} begins; {}\n", round, title) << std::flush;
    return;
  }
  TextTable table({"backend", "lanes", "depth", "block", "I/O", "seq read", "seq write", "random read",
                   "random write", "gain"});
  for (const Standing& each : std::span(standings).first(std::min(kRows, standings.size()))) {
    const Candidate& candidate = candidates_[each.candidate];
    std::vector<std::string> row{std::string(to_string(candidate.backend)),
                                 fmt::format("{}", candidate.lanes), fmt::format("{}", candidate.queue_depth),
                                 tuning::block_text(candidate.block_bytes),
                                 candidate.direct ? "direct" : "cache"};
    for (const double rate : each.rates) row.push_back(format_rate(rate));
    row.push_back(percent(each.gain));
    table.add(std::move(row));
  }
  const std::string text = fmt::format("round {}: {} measured, {}\n", round, standings.size(), title) +
                           (standings.empty() ? "" : table.render());
  end();
  out_ << text << std::flush;
  lines_ = static_cast<std::size_t>(std::ranges::count(text, '\n'));
}

std::string rates_table(const PatternRates& defaults, const PatternRates& best) {
  TextTable table({"", "defaults", "tuned", "gain"});
  for (std::size_t pattern = 0; pattern < defaults.size(); ++pattern) {
    table.add({std::string(tuning::pattern_name(pattern)), format_rate(defaults.at(pattern)),
               format_rate(best.at(pattern)), percent(best.at(pattern) / defaults.at(pattern))});
  }
  return table.render();
}

}  // namespace trunkline::cli
