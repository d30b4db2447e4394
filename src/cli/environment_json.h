// The machine on which results were measured, as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "os/environment.h"

namespace trunkline::cli {

// Limits that do not exist are null.
nlohmann::ordered_json environment_json(const os::Environment& environment);

// Program version, time of day (UTC, ISO 8601) and the machine: every JSON document starts with these.
nlohmann::ordered_json provenance_json(const os::Environment& environment);

}  // namespace trunkline::cli
