"""Locks of directories, and processes that are forked while one is held."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trunkline._flock import DirectoryLock


@contextmanager
def forked_child() -> Iterator[int]:
    """Fork a process that waits, as a worker of a DataLoader does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")  # what is done at a fork is done
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def opened_by(process: int) -> set[str]:
    return {str(entry.resolve()) for entry in Path(f"/proc/{process}/fd").iterdir()}


def test_one_at_a_time(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as one, DirectoryLock(tmp_path) as other:
        assert one.try_lock()
        assert not other.try_lock()
    with DirectoryLock(tmp_path) as other:
        assert other.try_lock()


def test_a_child_does_not_keep_it(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as lock:
        assert lock.try_lock()
        with forked_child() as child:
            assert str(tmp_path) not in opened_by(child), (
                "else it would keep the lock of a parent that is killed"
            )
            assert str(tmp_path) in opened_by(os.getpid())
            with DirectoryLock(tmp_path) as other:
                assert not other.try_lock(), "the child has not ended it"


def test_it_ends_for_copies_of_the_descriptor(tmp_path: Path) -> None:
    """As those that a process forked by other means has."""
    lock = DirectoryLock(tmp_path)
    with lock:
        assert lock.try_lock()
        copy = os.dup(lock._descriptor)
    with DirectoryLock(tmp_path) as other:
        assert other.try_lock()
    os.close(copy)
