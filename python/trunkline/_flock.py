"""Locks on directories between processes (flock), which end with the process that holds them."""

import fcntl
import os
import weakref
from pathlib import Path
from types import TracebackType

from trunkline._errors import system_errors


class DirectoryLock:
    """A lock on a directory; try_lock() acquires it, and leaving the context releases it.

    A forked child (a data loader's worker, for example) does not keep it.
    """

    def __init__(self, directory: Path) -> None:
        """Open the directory. Raises an Error that names it if it cannot be opened."""
        self.directory = directory
        with system_errors(f"open {directory} to lock it", directory):
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _open.add(self)

    def try_lock(self) -> bool:
        """Acquire it; return False if another process holds it. Raises OSError if locks are not supported."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                # Closing would release it only once all copies of the descriptor are closed.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            except OSError:  # a filesystem without locks
                pass
            finally:
                os.close(descriptor)


_open: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open):
        descriptor, lock._descriptor = lock._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
