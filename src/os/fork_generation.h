// Tells a forked child from its parent, at the price of one relaxed load.
#pragma once

namespace trunkline::os {

// A number that differs between a process and its forked children (exec starts anew). Threads, rings and
// locks made under another generation belong to the parent and must not be touched.
unsigned fork_generation();

}  // namespace trunkline::os
