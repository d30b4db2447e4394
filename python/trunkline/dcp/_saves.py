"""The saves of this process: in which order they began, which of them are under way, and what they leave.

Torch does all of a save in one thread, so a save is over when its thread has ended or begun another one, but
for one in a signal handler that interrupted it. On ranks that do not commit nothing else says so.

No thread waits here for locks that it has itself: StorageWriter refuses saves in signal handlers that
interrupt one of its methods. Where such a handler waits for a save of another thread, that one gives up.
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

# How long a save waits for another one of this process. Commits may be slow on network filesystems.
LOCK_SECONDS = 300.0

_MOST_DIRECTORIES = 256  # that are remembered; those with saves under way always are


@dataclass(eq=False)
class Save:
    """A save with collectives, on this rank."""

    number: int
    thread: threading.Thread
    found: frozenset[str]  # files of saves in its directory, when it looked; none if it does not commit
    # These without what other saves under way may have made, on any rank. They may end later than this one.
    removable: frozenset[str]
    directory_id: tuple[int, int]
    names: list[str] = field(default_factory=list)  # of files that this rank has made for it
    is_over: bool = False

    def is_under_way(self) -> bool:
        """Whether it may still commit."""
        return not self.is_over and self.thread.is_alive()


@dataclass(eq=False)
class _Directory:
    committing: threading.Lock = field(default_factory=threading.Lock)
    saves: list[Save] = field(default_factory=list)
    last: tuple[int, bytes] | None = None  # number and manifest of the newest save that has committed

    def is_in_use(self) -> bool:
        return self.committing.locked() or any(save.is_under_way() for save in self.saves)


class _OfThread(threading.local):
    def __init__(self) -> None:
        super().__init__()
        self.saves: list[Save] = []  # since this thread has begun the last one that is not nested


_numbers = itertools.count(1)
_reserved: "weakref.WeakKeyDictionary[threading.Thread, int]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # not held during access to storage, which may hang
_directories: dict[str, _Directory] = {}  # those used last are at the end
_of_thread = _OfThread()


def next_number() -> int:
    """Return the number of a save that begins in this thread: one that begins later has a larger one.

    A save of async_save begins with its thread, which may have to wait until the state is staged.
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
    """Whether it is a thread that torch starts for one call of async_save."""
    return thread.name.startswith("AsyncCheckpointExecutor")


def begin(directory: Path, number: int, names: Iterable[str], *, is_nested: bool = False) -> Save:
    """Add a save that has found files `names` of others in its directory, and has not made one yet.

    `is_nested`: in a signal handler that has interrupted another save of this thread, which goes on later.
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
        save = Save(number, threading.current_thread(), found, removable, directory_id)
        _of_thread.saves.append(save)
        saves.append(save)
        return save


def take_names_of_ended(directory: Path) -> set[str]:
    """Return files that this process made for saves that have ended, committed or not; each only once.

    Not those of another directory that had this path before.
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
    """Hold back other commits of this process into a directory, which may have no locks for files."""
    key = os.path.realpath(directory)
    with _obtainable(_lock):
        lock = _directory_of(key).committing
    with _obtainable(lock, directory):
        yield


def _obtainable(lock: threading.Lock, directory: "Path | None" = None) -> threading.Lock:
    """Return the lock. Raises Error (EBUSY) where it would be waited for without an end.

    Handlers run in the main thread, so only others may wait for a thread that waits for them. The main thread
    takes a lock in one step, which no exception of a handler interrupts: these take it once more.
    """
    if threading.current_thread() is not threading.main_thread():
        if not lock.acquire(timeout=LOCK_SECONDS):
            raise Error(
                errno.EBUSY,
                f"cannot save{'' if directory is None else f' to {directory}'}: another save of this process "
                f"has kept a lock for {LOCK_SECONDS:g} s. If a signal handler has interrupted that save, and "
                "waits for this one, set a flag in the handler instead, and save in the training loop",
                None if directory is None else str(directory),
            )
        lock.release()
    return lock


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
    if len(_directories) >= _MOST_DIRECTORIES:
        unused = next((other for other, value in _directories.items() if not value.is_in_use()), None)
        if unused is not None:
            del _directories[unused]
    _directories[key] = found
    return found


def _begin_anew() -> None:
    """After a fork: the saves are those of the parent."""
    global _lock
    _lock = threading.Lock()
    _directories.clear()
    _of_thread.saves.clear()


os.register_at_fork(after_in_child=_begin_anew)
