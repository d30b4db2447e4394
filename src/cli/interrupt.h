// Ctrl-C and similar signals: work stops at the next safe point, so that files are removed, and memory is not
// freed while the kernel still writes to it.
#pragma once

namespace trunkline::cli {

// Makes SIGINT, SIGTERM and SIGHUP set a flag instead of ending the process, and SIGPIPE harmless. Call once,
// early.
void catch_interrupts();

bool interrupted();

// Ends the process by the signal that was caught, so that the parent sees what happened. Call after cleaning
// up; returns only if no signal was caught.
void end_by_caught_signal();

}  // namespace trunkline::cli
