// How long the end of the process waits for a device that does nothing.
#pragma once

#include <chrono>

namespace trunkline::os {

// TRUNKLINE_EXIT_TIMEOUT in the environment, in seconds, else 120: without an end, a device that hangs would
// keep the process from exiting.
std::chrono::milliseconds exit_patience();

}  // namespace trunkline::os
