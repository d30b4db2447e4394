// Interprets the result of a command for its transfer and counts it: shared by lanes and the caller's thread.
#pragma once

#include <cstdint>

#include "io/lane/counters.h"
#include "io/lane/transfer.h"

namespace trunkline::io {

// Monotonic nanoseconds.
std::uint64_t now_ns();

// advance(), counted with the time since Transfer::sent_ns. After a rejected direct transfer, the file's
// later ones are not direct.
Verdict judge(Transfer& transfer, std::int64_t result, Counters& counters);

}  // namespace trunkline::io
