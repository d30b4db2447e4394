// Runs another program and waits for it.
#pragma once

#include <string>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::cli {

struct Finished {
  int status = 0;  // exit status; 128 + signal if a signal terminated it
  std::string output;
  std::string errors;
};

// `command[0]` is looked up in PATH; fails with system (ENOENT) when it is not found. When the user
// interrupts, the program is terminated too and the result is `cancelled`.
Result<Finished> run_to_end(const std::vector<std::string>& command);

}  // namespace trunkline::cli
