// The trace that TRUNKLINE_TRACE asks for. Others: trunkline/trace.h.
#pragma once

namespace trunkline::os {

// Begins the trace that the environment names, in the process that is the first to call this; later calls do
// nothing. What prevents it is reported on stderr.
void start_trace_from_environment();

// Writes that trace, if there is one. Called at the exit of the process; earlier by what ends it without exit
// handlers. Idempotent.
void finish_trace_from_environment();

}  // namespace trunkline::os
