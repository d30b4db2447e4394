// What `trunkline tune` shows while it measures, and at the end.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "cli/tune/candidates.h"
#include "cli/tune/halving.h"

namespace trunkline::cli {

// "io_uring, 2 lanes, queue depth 32, blocks of 4 MiB, direct I/O"
std::string describe(const Candidate& candidate);

// On a terminal: a table that is redrawn in place. Elsewhere: a line for each round. For use by one thread.
class TuneDisplay {
 public:
  TuneDisplay(std::ostream& out, bool terminal, const std::vector<Candidate>& candidates)
      : out_(out), terminal_(terminal), candidates_(candidates) {}

  void show(const std::vector<Standing>& standings, unsigned round, double noise, double seconds,
            double budget_s);

  // Removes the table.
  void end();

 private:
  std::ostream& out_;
  const bool terminal_;
  const std::vector<Candidate>& candidates_;
  std::size_t lines_ = 0;  // that are drawn
  unsigned round_ = 0;     // that a line was printed for
};

// The rates of the patterns, the defaults beside the best.
std::string rates_table(const PatternRates& defaults, const PatternRates& best);

}  // namespace trunkline::cli
