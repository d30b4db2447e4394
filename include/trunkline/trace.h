// Recording what the library does, as a file that ui.perfetto.dev and chrome://tracing open: each operation,
// transfer, wait, copy and checksum, with its path, range, bytes, I/O path and result. docs/tracing.md shows
// how to read one.
#pragma once

#include <cstdint>
#include <string>

#include "trunkline/error.h"

namespace trunkline {

// Begins to record, in all threads of the process; the file is written by stop_trace(). Fails with
// invalid_argument where a trace is being recorded already, and where no file can be made at `path`; a
// relative path is of the working directory as it is now. A forked child records nothing.
//
// TRUNKLINE_TRACE in the environment names a file for the whole process instead, from the first engine to the
// exit; "%p" in it stands for the process id.
Status start_trace(const std::string& path);

struct TraceSummary {
  std::string path;
  std::uint64_t events = 0;
  std::uint64_t dropped_events = 0;  // the oldest of threads with more than 65536
};

// Ends the recording and writes the file, under a temporary name first. Fails with invalid_argument where no
// trace is recorded. Where writing fails, what was recorded is lost.
Result<TraceSummary> stop_trace();

}  // namespace trunkline
