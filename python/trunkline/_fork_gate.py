"""Keeps forks out of a section of code that another thread runs."""

import os
import threading
from types import TracebackType

_TIMEOUT_SECONDS = 1.0


class ForkGate:
    """A section, entered by `with`, in the middle of which os.fork() does not copy the process.

    A child has only the thread that forked. What another thread had locked at that moment stays locked in the
    child: logging renews its own locks, but not that of the stream a handler writes to, and the child's first
    record waits for it for ever. So os.fork(), and all that uses it, waits until no thread is in the section;
    for at most a second, since the section may run code of the user that waits for the thread that forks.
    Other threads enter the section only after the fork. Thread-safe; for one thread at a time in the section.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._reset
        )

    def _reset(self) -> None:
        self._changed = threading.Condition()  # reentrant: a signal handler may fork
        # Threads that fork. Not a count: a fork that another began may end here without having begun here, if
        # this was registered by a hook of that fork, or in a child that a signal handler forked meanwhile.
        self._forking: set[int] = set()
        self._inside: int | None = None  # the thread in the section

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking, _TIMEOUT_SECONDS)
            self._inside = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside = None
            self._changed.notify_all()

    def _before_fork(self) -> None:
        this_thread = threading.get_ident()
        with self._changed:
            self._forking.add(this_thread)
            # Code of the section may itself fork.
            self._changed.wait_for(lambda: self._inside in (None, this_thread), _TIMEOUT_SECONDS)
            self._forking.add(this_thread)  # again: a signal handler may have forked meanwhile

    def _after_fork(self) -> None:
        with self._changed:
            self._forking.discard(threading.get_ident())
            self._changed.notify_all()
