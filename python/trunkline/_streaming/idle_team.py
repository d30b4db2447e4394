"""Lets OpenMP's threads sleep, rather than spin, while a streamed model waits for storage."""

import ctypes
import os
import threading
import weakref
from contextlib import suppress

from trunkline._processors import available_processors

# Whoever sets one of these has chosen how threads wait.
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class IdleTeam:
    """A team of threads that does nothing, for as long as this object lives.

    libgomp, the OpenMP library of torch, lets threads spin for milliseconds after each parallel region, but
    hardly at all when it has more threads than there are processors (gomp_managed_threads in its
    config/linux/wait.h; OMP_WAIT_POLICY is read only when it is loaded). The threads of this team sleep.
    """

    def __init__(self, library: str) -> None:
        """`library`: the file of libgomp, which is loaded."""
        ended, ready = threading.Event(), threading.Event()
        thread = threading.Thread(
            target=_hold_team, args=(library, ready, ended), daemon=True, name="trunkline-idle-team"
        )
        thread.start()
        ready.wait()
        weakref.finalize(self, ended.set)


_lock = threading.Lock()
_current: "weakref.ref[IdleTeam] | None" = None


def idle_team() -> IdleTeam | None:
    """Return the team of this process, which is made unless there is one; None where it has no effect."""
    global _current
    if any(name in os.environ for name in _CHOICES):
        return None
    library = _loaded_libgomp()
    if library is None:
        return None
    with _lock:
        found = None if _current is None else _current()
        if found is None:
            found = IdleTeam(library)
            _current = weakref.ref(found)
        return found


def _loaded_libgomp() -> str | None:
    """Return the file of the libgomp that is loaded; None if there is none, or several."""
    found: set[str] = set()
    with suppress(OSError), open("/proc/self/maps") as maps:  # noqa: PTH123
        found = {line.split(maxsplit=5)[5].strip() for line in maps if "/libgomp" in line}
    return found.pop() if len(found) == 1 else None


def _hold_team(library: str, ready: threading.Event, ended: threading.Event) -> None:
    """Run a parallel region that does nothing; its threads stay until this thread ends."""
    try:
        with suppress(OSError, AttributeError):
            nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of NULL, in each thread
            run = ctypes.CDLL(library).GOMP_parallel
            run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            run.restype = None
            run(nothing, None, available_processors() + 1, 0)
    finally:
        ready.set()
    ended.wait()
