// The options of `trunkline tune`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trunkline/error.h"
#include "trunkline/units.h"

namespace trunkline::cli {

struct TuneOptions {
  std::vector<std::string> paths = {};
  double budget_s = 60;
  std::uint64_t size_bytes = kGB;  // of the scratch file in each path, at most
  std::string export_file = {};    // empty: none
  bool merge = false;
  bool forget = false;
  double exhaustive_s = 0;  // for each candidate and pattern; 0: search
  bool json = false;
};

// Checks what the parser of the command line cannot.
Status check(const TuneOptions& options);

}  // namespace trunkline::cli
