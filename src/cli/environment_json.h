// The machine that results were found on, as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "os/environment.h"

namespace trunkline::cli {

// Limits that do not exist are null.
nlohmann::ordered_json environment_json(const os::Environment& environment);

// Version of the program, time of day (UTC, ISO 8601) and the machine: what every JSON document starts with.
nlohmann::ordered_json provenance_json(const os::Environment& environment);

}  // namespace trunkline::cli
