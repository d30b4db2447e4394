// What to change on a machine, based on the findings.
#pragma once

#include <string>
#include <vector>

#include "cli/doctor/findings.h"

namespace trunkline::cli {

// Most useful first; empty when nothing can be improved. Depends on the findings alone.
std::vector<std::string> advise(const Findings& findings);

}  // namespace trunkline::cli
