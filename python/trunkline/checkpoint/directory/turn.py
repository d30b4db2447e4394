"""Lets one call at a time begin a save, and rejects calls of signal handlers that interrupt such a call."""

import os
import threading

from trunkline._errors import Error


class Turn:
    """A thread's turn to begin a save: call check(), then `with turn.lock:`, and within it begin() and end().

    A signal handler runs in the main thread, in the middle of any call. If the handler saves while a save()
    of the main thread holds the lock, waiting for the lock would never end. So the lock is reentrant, and
    check() raises, unless the interrupted call has begun nothing yet, which pause() declares.

    A handler may also raise, between any two steps of the call that it interrupts. Then end() may never be
    called; so a call counts as running only while its thread holds the lock, which such an exception
    releases.
    """

    def __init__(self) -> None:
        """Nobody holds it."""
        # Not a lock written in Python: it is acquired and released atomically, whatever a handler raises.
        self.lock = threading.RLock()
        self._call = ""  # the running call; valid only in the thread that holds the lock

    def begin(self, call: str) -> None:
        """Reject calls that signal handlers make in this thread from now on."""
        self._call = call

    def end(self) -> None:
        """Undo begin()."""
        self._call = ""

    pause = end  # while the call waits and has begun nothing; call begin() when it goes on

    def check(self, call: str, directory: "str | os.PathLike[str]", during: str = "") -> None:
        """Raise Error if this thread is within another call.

        With `during`: only if that call's text begins with it ("save" for "save(5)").
        """
        if not self.is_within_call() or not self._call.startswith(during):
            return
        raise Error(
            None,
            f"cannot {call} in {directory}: a signal handler called it while {self._call} was running in the "
            "same thread; set a flag in the handler, and save in the training loop "
            '("Preemption" in docs/checkpoints.md shows how)',
            os.fspath(directory),
        )

    def forget_parent(self) -> None:
        """In a forked child: a thread that the child does not have may hold the lock."""
        self.lock = threading.RLock()
        self._call = ""

    def is_within_call(self) -> bool:
        """Whether this thread is within a call that has begun something: it runs a signal handler."""
        return bool(self._call) and self.lock._is_owned()  # type: ignore[attr-defined]  # as threading.Condition
