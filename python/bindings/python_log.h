// The library's log records, handed to Python's logging.
#pragma once

#include <nanobind/nanobind.h>

namespace trunkline::python {

// Makes the levels that Python's loggers have now those of the library: at the beginning of calls that are
// few and may log much. Acquires no lock of Python's logging. Raises what signal handlers raise. Needs the
// GIL.
void adopt_log_levels();

// For the exit of the interpreter: delivers what is left, and ends the thread. Later records go to stderr, if
// TRUNKLINE_LOG asks for any. Needs the GIL.
void stop_log_delivery();

}  // namespace trunkline::python
