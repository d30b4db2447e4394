"""Locks of directories between processes (flock), which end with the process that took them."""

import fcntl
import os
import weakref
from pathlib import Path
from types import TracebackType


class DirectoryLock:
    """A lock of a directory, not taken yet; a context manager that ends it.

    A child that is forked meanwhile (a worker that loads data) does not keep it.
    """

    def __init__(self, directory: Path) -> None:
        """Open the directory. Raises OSError where it cannot be opened."""
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _open.add(self)

    def take(self) -> bool:
        """Take it; return False if another process has it. Raises OSError on a filesystem without locks."""
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
                # Closing would end it only once all copies of the descriptor are closed.
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
