// An engine's description of itself as JSON, with the same members as in Python.
#pragma once

#include <nlohmann/json.hpp>

#include "trunkline/engine.h"
#include "trunkline/error.h"

namespace trunkline::cli {

nlohmann::ordered_json config_json(const EngineConfig& config);
nlohmann::ordered_json explanation_json(const Explanation& explanation);
nlohmann::ordered_json error_json(const Error& error);

}  // namespace trunkline::cli
