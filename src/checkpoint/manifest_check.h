// Constraints on a manifest that its types do not express.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/manifest.h"

namespace trunkline::checkpoint {

// Why readers reject the manifest (except its `state`); nullopt if they accept it.
std::optional<std::string> objection_to(const Manifest& manifest);

}  // namespace trunkline::checkpoint
