// Runs another program to its end.
#pragma once

#include <string>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::cli {

struct Finished {
  int status = 0;  // exit status; 128 + signal when a signal ended it
  std::string output;
  std::string errors;
};

// `command[0]` is looked up in PATH; system (ENOENT) when it is not there. When the user interrupts, the
// program is ended too and the result is `cancelled`.
Result<Finished> run_to_end(const std::vector<std::string>& command);

}  // namespace trunkline::cli
