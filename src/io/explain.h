// Which I/O path a file uses, and why; what does not work is found out by trying.
#pragma once

#include <string>

#include "trunkline/engine.h"

namespace trunkline::io {

Result<Explanation> explain(const EngineCore& core, const std::string& path);

}  // namespace trunkline::io
