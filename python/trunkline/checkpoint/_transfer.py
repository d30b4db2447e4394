"""Writing and reading FileImages: in a thread of its own, so that Ctrl-C ends it and cleans up."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trunkline._core import Engine, FileImage, FileSet, ImageRead
from trunkline.checkpoint._flag import Flag


class Work:
    """Runs `job` in a thread beside the caller's.

    The interpreter waits for the thread before it exits, as for every one that is no daemon.
    """

    def __init__(self, job: Callable[[], None], cancel: Callable[[], None], name: str) -> None:
        """`cancel` makes the job end soon."""
        self._job = job
        self._cancel = cancel
        self._lock = threading.Lock()
        self._begun = self._given_up = False
        self._done = Flag()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    def _run(self) -> None:
        with self._lock:
            if self._given_up:
                return
            self._begun = True
        try:
            self._job()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def result(self) -> None:
        """Do the job, and raise what it raises.

        What a signal handler raises ends it first: when this raises, the job is over, also when the signal
        came while the thread was being started.
        """
        try:
            self._thread.start()
            self._done.wait()
            self._thread.join()
        except BaseException:
            with self._lock:
                self._given_up = not self._begun
            if not self._given_up:
                self._cancel()
                self._done.wait()
            raise
        if self._error is not None:
            raise self._error


def write_images(
    images: Sequence[FileImage], *, engine: Engine | None = None, durable: bool = True, replace: bool = True
) -> list[list[int]]:
    """Write all of `images`; each file appears whole, with `durable` for good. Returns their checksums."""
    files = FileSet(images, engine=engine, durable=durable, replace=replace)

    def job() -> None:
        files.stage()
        files.finish()

    try:
        _run(job, files.cancel, "trunkline-save")
    except BaseException:
        files.discard()  # also when the job never began
        raise
    return [files.sums(index) for index in range(len(images))]


def read_images(images: Sequence[FileImage], *, engine: Engine | None = None, verify: bool = True) -> None:
    """Fill the memory of `images`, from the page cache those that it holds already.

    Raises Corrupt with `image` and `sum` for a checksum that differs.
    """
    read = ImageRead(images, engine=engine, verify=verify, direct="unless_cached")
    _run(read.run, read.cancel, "trunkline-load")


def _run(job: Callable[[], None], cancel: Callable[[], None], name: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        job()  # no signal handler runs here
        return
    Work(job, cancel, name).result()


def path_name(path: Any) -> str:
    """Return a path argument as str."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(f"path: must be str, bytes or os.PathLike, not {type(path).__name__}") from None
