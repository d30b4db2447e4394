"""One call at a time begins a save, and signal handlers that call in the midst of one are told so."""

import os
import threading

from trunkline._errors import Error


class Turn:
    """What a thread holds while it begins a save: check(), `with turn.lock:`, and in it begin() and end().

    A signal handler runs in the main thread, in the midst of whatever that does. When the handler saves while
    a save() of the main thread holds the lock, waiting for the lock would never end. So the lock lets its own
    thread in again, and check() raises, unless the interrupted call has begun nothing yet: pause() says so.

    A handler may also raise, between any two steps of the call that it interrupts. Then end() may never be
    called; whether a call is running is therefore what the lock says, which such an exception releases.
    """

    def __init__(self) -> None:
        """Nobody holds it."""
        # Not a lock of Python code: it is taken and released in one step, whatever a handler raises.
        self.lock = threading.RLock()
        self._call = ""  # that rejects others; counts only in the thread that holds the lock

    def begin(self, call: str) -> None:
        """From now on calls of this thread that are made in a signal handler are rejected."""
        self._call = call

    def end(self) -> None:
        """Undo begin()."""
        self._call = ""

    pause = end  # while the call waits and has begun nothing; begin() when it goes on

    def check(self, call: str, directory: "str | os.PathLike[str]", during: str = "") -> None:
        """Raise Error if this thread is within another call.

        With `during`: only if that call's text begins with it ("save" for "save(5)").
        """
        if not self.is_within_call() or not self._call.startswith(during):
            return
        raise Error(
            None,
            f"cannot {call} in {directory}: {self._call} is already running in this thread, and a signal "
            "handler called in the midst of it; set a flag in the handler and save in the training loop "
            '("Preemption" in docs/checkpoints.md shows how)',
            os.fspath(directory),
        )

    def forget_parent(self) -> None:
        """In a forked child: a thread that the child does not have may hold the lock."""
        self.lock = threading.RLock()
        self._call = ""

    def is_within_call(self) -> bool:
        """Whether this thread is within a call that has begun something: in a signal handler."""
        return bool(self._call) and self.lock._is_owned()  # type: ignore[attr-defined]  # as threading.Condition
