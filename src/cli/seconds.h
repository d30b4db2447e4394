// Durations on the command line.
#pragma once

#include <string_view>

#include "trunkline/error.h"

namespace trunkline::cli {

// "90", "60s", "1.5min", "2m", "1h": seconds. Messages begin with the option.
Result<double> parse_seconds(std::string_view option, std::string_view text);

}  // namespace trunkline::cli
