// Measures, and chooses.
#pragma once

#include <string>
#include <vector>

#include "cli/progress.h"
#include "cli/tune/candidates.h"
#include "cli/tune/halving.h"
#include "cli/tune/tune_options.h"
#include "tuning/tuning.h"

namespace trunkline::cli {

struct TuneResult {
  std::vector<tuning::Storage> storages;
  std::vector<Candidate> candidates;  // the defaults first
  HalvingResult halving;
  std::uint64_t file_bytes = 0;  // of each scratch file
  double seconds = 0;            // all of it took

  const Candidate& best() const { return candidates[halving.best]; }
};

// The engines of this process follow no tuning from here on, since it measures without one. Its scratch files
// are gone when it returns, also when the user interrupts (`cancelled`).
Result<TuneResult> run_tune(const TuneOptions& options, std::ostream& out, bool terminal);

}  // namespace trunkline::cli
