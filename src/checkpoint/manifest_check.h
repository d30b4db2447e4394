// What a manifest may say beyond what its types can.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/manifest.h"

namespace trunkline::checkpoint {

// Why readers refuse the manifest (its `state` aside); nothing when they take it.
std::optional<std::string> objection_to(const Manifest& manifest);

}  // namespace trunkline::checkpoint
