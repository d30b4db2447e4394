// What to change on a machine, from what was found on it.
#pragma once

#include <string>
#include <vector>

#include "cli/doctor/findings.h"

namespace trunkline::cli {

// Most useful first; empty when nothing is to be gained. Decides on the findings alone.
std::vector<std::string> advise(const Findings& findings);

}  // namespace trunkline::cli
