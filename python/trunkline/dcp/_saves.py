"""The saves of this process: the order in which they began, which are running, and the files they leave.

Torch runs a save in one thread, so a save has ended when its thread has ended or begun another one, except
for one in a signal handler that interrupted it. On ranks that do not commit there is no other sign.

No thread waits here for locks that it holds itself: StorageWriter rejects saves in signal handlers that
interrupt one of its methods. If such a handler waits for a save of another thread, that save fails.
"""

import contextlib
import errno
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trunkline._errors import Error
from trunkline._logging import Log
from trunkline._waits import Wait

# How long a save waits for another save of this process. Commits may be slow on network filesystems.
LOCK_SECONDS = 300.0

_MAX_DIRECTORIES = 256  # that are remembered, besides those with running saves

_log = Log("checkpoint")


@dataclass(eq=False)
class CollectiveSave:
    """A save with collectives, on this rank."""

    number: int
    thread: threading.Thread
    found: frozenset[str]  # files of other saves in its directory when it began; empty if it does not commit
    # Those without files that other running saves may have created, on any rank: these may end later.
    removable: frozenset[str]
    directory_id: tuple[int, int]
    names: list[str] = field(default_factory=list)  # of files that this rank has created for it
    is_over: bool = False

    def is_under_way(self) -> bool:
        """Whether it may still commit."""
        return not self.is_over and self.thread.is_alive()


@dataclass(eq=False)
class _Directory:
    committing: threading.Lock = field(default_factory=threading.Lock)
    saves: list[CollectiveSave] = field(default_factory=list)
    last: tuple[int, bytes] | None = None  # number and digest of the newest save that has committed

    def is_in_use(self) -> bool:
        return self.committing.locked() or any(save.is_under_way() for save in self.saves)


class _OfThread(threading.local):
    def __init__(self) -> None:
        super().__init__()
        self.saves: list[CollectiveSave] = []  # since the last one that is not nested began in this thread


_numbers = itertools.count(1)
_reserved: "weakref.WeakKeyDictionary[threading.Thread, int]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # not held during access to storage, which may hang
_directories: dict[str, _Directory] = {}  # those used last are at the end
_of_thread = _OfThread()


def next_number() -> int:
    """Return the number of a save that begins in this thread; saves that begin later get larger ones.

    A save of async_save counts from when its thread starts, though it may wait until the state is staged.
    """
    here = threading.current_thread()
    with _obtainable(_lock):
        for thread in threading.enumerate():  # in the order in which they have started
            if thread is here and _is_of_async_save(here):
                break
            if _is_of_async_save(thread) and thread not in _reserved:
                _reserved[thread] = next(_numbers)
        return _reserved.get(here) or next(_numbers)


def _is_of_async_save(thread: threading.Thread) -> bool:
    """Whether torch started the thread for a call of async_save."""
    return thread.name.startswith("AsyncCheckpointExecutor")


def begin(directory: Path, number: int, names: Iterable[str], *, is_nested: bool = False) -> CollectiveSave:
    """Add a save that has created no file yet; `names`: files of other saves in its directory.

    `is_nested`: it runs in a signal handler that interrupted another save of this thread.
    """
    key, directory_id, found = os.path.realpath(directory), _id_of(directory), frozenset(names)
    with _obtainable(_lock):
        if not is_nested:
            for ended in _of_thread.saves:
                ended.is_over = True
            _of_thread.saves.clear()
        saves = _directory_of(key).saves
        saves[:] = [save for save in saves if save.is_under_way() or save.names]
        removable = found.intersection(*(save.found for save in saves if save.is_under_way()))
        save = CollectiveSave(number, threading.current_thread(), found, removable, directory_id)
        _of_thread.saves.append(save)
        saves.append(save)
        return save


def take_names_of_ended(directory: Path) -> set[str]:
    """Return files that this process created for saves that have ended, committed or not; each only once.

    Not files of another directory that had this path before.
    """
    key, here = os.path.realpath(directory), _id_of(directory)
    with _obtainable(_lock):
        saves = _directory_of(key).saves
        ended = [save for save in saves if not save.is_under_way()]
        saves[:] = [save for save in saves if save not in ended]
        return {name for save in ended if save.directory_id == here for name in save.names}


def _id_of(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def committing(directory: Path) -> Iterator[None]:
    """Block other commits of this process into a directory, whose filesystem may not support locks."""
    key = os.path.realpath(directory)
    with _obtainable(_lock):
        lock = _directory_of(key).committing
    with _obtainable(lock, directory):
        yield


def _obtainable(lock: threading.Lock, directory: "Path | None" = None) -> threading.Lock:
    """Return the lock. Raises Error (EBUSY) instead of waiting for it forever.

    Signal handlers run in the main thread, so only other threads can wait for a thread that waits for them.
    The main thread acquires a lock atomically, so no handler's exception interrupts that; other threads check
    first that they can acquire it.
    """
    if threading.current_thread() is not threading.main_thread():
        if not _wait_for(lock, directory):
            raise Error(
                errno.EBUSY,
                f"cannot save{'' if directory is None else f' to {directory}'}: another save of this process "
                f"has held a lock for {LOCK_SECONDS:g} s. If a signal handler interrupted that save, and "
                "waits for this one, set a flag in the handler instead, and save in the training loop",
                None if directory is None else str(directory),
            )
        lock.release()
    return lock


def _wait_for(lock: threading.Lock, directory: "Path | None") -> bool:
    """Acquire the lock; False if that takes longer than LOCK_SECONDS."""
    if lock.acquire(blocking=False):
        return True
    of = "" if directory is None else str(directory)
    with Wait(_log, "wait for another save of this process", of) as wait:
        return wait.until(
            lambda seconds: lock.acquire(timeout=LOCK_SECONDS if seconds is None else seconds),
            lambda: f"another save of this process{of and f' into {of}'}, which is being committed",
            LOCK_SECONDS,
        )


def last_committed(directory: Path) -> tuple[int, bytes] | None:
    """Return number and manifest_digest() of the newest save that has committed, as far as remembered."""
    key = os.path.realpath(directory)
    with _obtainable(_lock):
        return _directory_of(key).last


def note_committed(directory: Path, number: int, digest: bytes) -> None:
    """Remember a commit."""
    key = os.path.realpath(directory)
    with _obtainable(_lock):
        _directory_of(key).last = (number, digest)


def _directory_of(key: str) -> _Directory:
    found = _directories.pop(key, None) or _Directory()
    if len(_directories) >= _MAX_DIRECTORIES:
        unused = next((other for other, value in _directories.items() if not value.is_in_use()), None)
        if unused is not None:
            del _directories[unused]
    _directories[key] = found
    return found


def _forget_parent() -> None:
    """In a forked child: the saves belong to the parent."""
    global _lock
    _lock = threading.Lock()
    _directories.clear()
    _of_thread.saves.clear()


os.register_at_fork(after_in_child=_forget_parent)
