// Distinguishes a forked child from its parent, at the cost of one relaxed load.
#pragma once

namespace trunkline::os {

// A number that differs between a process and its forked children (exec starts over). Threads, rings and
// locks created under another generation belong to the parent and must not be touched.
unsigned fork_generation();

}  // namespace trunkline::os
