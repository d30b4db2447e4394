// The process's cuFile: found, and opened at first use.
#pragma once

#include <optional>
#include <string>

#include "device/gds/api.h"

namespace trunkline::cufile {

// Why no file of this machine can be reached by a GPU itself, as far as can be told without opening anything;
// nullopt: one may.
std::optional<std::string> why_not_here();

// Loads the library and opens the driver, unless that is done; they stay so until the process ends. The
// calling thread must have a CUDA context.
Result<const Api*> open_driver();

}  // namespace trunkline::cufile
