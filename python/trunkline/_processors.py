"""How many processors this process may use."""

import os


def available_processors() -> int:
    """Return their number; that of the machine where a sandbox does not let the process ask for its own."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1
