// What the result of a command means for its transfer, counted: the same for lanes and for the caller's
// thread.
#pragma once

#include <cstdint>

#include "io/lane/counters.h"
#include "io/lane/transfer.h"

namespace trunkline::io {

// Monotonic nanoseconds.
std::uint64_t now_ns();

// advance(), counted with the time since Transfer::sent_ns. A direct transfer that was refused is the last
// one of its file.
Verdict judge(Transfer& transfer, std::int64_t result, Counters& counters);

}  // namespace trunkline::io
