// What lanes and inline callers do with the result of a command: apply it to the transfer, count it, and
// record it in logs and traces.
#pragma once

#include <cstdint>

#include "io/lane/counters.h"
#include "io/lane/transfer.h"

namespace trunkline::io {

// Monotonic nanoseconds.
std::uint64_t now_ns();

// Calls advance(), and counts the command with the time from Transfer::submitted_ns to `ended_ns`. If direct
// I/O was rejected, the file's later transfers do not use it.
Outcome handle_result(Transfer& transfer, std::int64_t result, std::uint64_t ended_ns, Counters& counters);

}  // namespace trunkline::io
