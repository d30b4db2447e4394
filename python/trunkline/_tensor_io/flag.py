"""An event whose waits may be interrupted by signal handlers."""

import threading
from contextlib import suppress


class Flag:
    """Like threading.Event, but it can only be set once.

    Waiting for an Event acquires a lock that all threads share, in Python code; if a signal handler raises at
    that moment, the lock is held forever, and the next thread that sets the event, or waits for it, hangs.
    Here each wait has its own lock, and the flag has none.
    """

    def __init__(self) -> None:
        """Not set."""
        self._set = False
        self._waiting: list[threading.Lock] = []  # each held; released by set()

    def is_set(self) -> bool:
        """Whether it is set. Never blocks."""
        return self._set

    def set(self) -> None:
        """Set it, and wake all who wait."""
        self._set = True
        with suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for `timeout` seconds; return whether it is set."""
        if self._set:
            return True
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        if not self._set:  # otherwise set() may have missed this lock
            mine.acquire(timeout=-1 if timeout is None else min(max(0, timeout), threading.TIMEOUT_MAX))
        with suppress(ValueError):
            self._waiting.remove(mine)
        return self._set
