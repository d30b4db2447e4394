// Waits that leave the GIL to other threads and end at Ctrl-C.
#pragma once

#include <chrono>
#include <functional>

#include "trunkline/future.h"

namespace trunkline::python {

// How long a wait may keep a signal from its Python handler.
inline constexpr std::chrono::milliseconds kSignalLatency{50};

// Runs signal handlers that are due; throws what they raise (KeyboardInterrupt). Needs the GIL; only does
// something on the main thread, where Python runs its handlers.
void check_signals();

// Future::wait() without the GIL; on the main thread in slices, between which signal handlers run. Needs the
// GIL.
bool wait_interruptibly(const Future& future, Future::Timeout timeout);

// The result of an operation whose memory only the caller of this keeps: when a signal handler ends the wait,
// the operation is cancelled and awaited first.
Result<std::uint64_t> result_or_cancel(Future future);

// Runs a call that may block for long and cannot be cut into slices, without the GIL. On the main thread it
// runs beside, so that a signal handler can end the wait for it; the call itself goes on to its end.
Status call_interruptibly(std::function<Status()> call);

}  // namespace trunkline::python
