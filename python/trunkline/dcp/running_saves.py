"""The saves that Checkpointers of this process have begun in the background, and their errors."""

import atexit
import os
import threading
from concurrent.futures import Future
from pathlib import Path

from trunkline._tensor_io.at_exit import end_by_failure, say

_lock = threading.RLock()  # a signal handler may interrupt its holder
_running: "dict[Future[None], str]" = {}  # with the directory
_unseen: "dict[Future[None], str]" = {}  # failed, and nobody has seen the error: with what failed


def begin(save: "Future[None]", directory: Path, what: str) -> None:
    """Note that a save into a directory has begun. `what`: for the message at exit."""
    with _lock:
        _running[save] = os.path.realpath(directory)
        _unseen[save] = what


def end(save: "Future[None]", *, failed: bool) -> None:
    """Note that it has ended."""
    with _lock:
        _running.pop(save, None)
        if not failed:
            _unseen.pop(save, None)


def see(save: "Future[None]") -> None:
    """Note that its error has been raised."""
    with _lock:
        _unseen.pop(save, None)


def await_saves_into(directory: "str | Path") -> None:
    """Wait for all saves into the directory, by any Checkpointer of this process; their errors are theirs."""
    into = os.path.realpath(directory)
    with _lock:
        saves = [save for save, where in _running.items() if where == into]
    for save in saves:
        Future.exception(save)


class SaveFuture(Future[None]):
    """The result of a save; who asks for its error has seen it."""

    def __init__(self) -> None:
        """It runs: cancel() has no effect."""
        super().__init__()
        self.set_running_or_notify_cancel()

    def end(self, error: BaseException | None) -> None:
        """Say how the save has ended."""
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> None:
        """As that of concurrent.futures.Future."""
        try:
            super().result(timeout)
        finally:
            if self.done():
                see(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As that of concurrent.futures.Future."""
        try:
            return super().exception(timeout)
        finally:
            if self.done():
                see(self)


def _report_at_exit() -> None:
    """Print errors that nobody has seen, and let the process fail."""
    with _lock:
        failed = [(save, what) for save, what in _unseen.items() if save.done()]
        _unseen.clear()
    for save, what in failed:
        say(f"{what} failed: {Future.exception(save)}")
    if failed:
        end_by_failure()


def _forget_parent() -> None:
    """In a forked child: the saves go on in the parent, which reports them."""
    global _lock
    _lock = threading.RLock()
    _running.clear()
    _unseen.clear()


os.register_at_fork(after_in_child=_forget_parent)
atexit.register(_report_at_exit)  # by then the threads of saves have been joined
