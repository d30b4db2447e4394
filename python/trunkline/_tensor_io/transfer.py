"""Writing and reading FileLayouts: in a separate thread, so that Ctrl-C ends it and cleans up."""

import threading
from collections.abc import Callable, Sequence

from trunkline._core import Engine, FileLayout, FileReader, FileSet
from trunkline._tensor_io.background import Claim, start_thread
from trunkline._tensor_io.flag import Flag


class Work:
    """Runs `job` in a thread beside the caller's.

    The interpreter waits for the job before it exits (background.py).
    """

    def __init__(self, job: Callable[[], None], cancel: Callable[[], None]) -> None:
        """`cancel` makes the job end soon."""
        self._job: Callable[[], None] | None = job
        self._cancel = cancel
        self._claim = Claim()  # by its thread, or by the one that waits for it, which then gives it up
        self._done = Flag()
        self._error: BaseException | None = None

    def _run(self) -> None:
        job, self._job = self._job, None
        if job is None or not self._claim.take():
            return
        try:
            job()
        except BaseException as error:
            self._error = error
        del job  # its memory is free when the flag is set

    def result(self) -> None:
        """Do the job, and raise what it raises.

        What a signal handler raises ends it first: when this raises, the job is over, also when the signal
        came while the thread was being started.
        """
        try:
            start_thread(self._run, self._done)
            self._done.wait()
        except BaseException:
            if not self._claim.take():
                self._cancel()
                self._done.wait()
            raise
        if self._error is not None:
            raise self._error


def write_layouts(
    layouts: Sequence[FileLayout], *, engine: Engine | None = None, durable: bool = True, replace: bool = True
) -> list[list[int]]:
    """Write all of `layouts` and return their checksums.

    Each file appears whole, and with `durable` is there after a power failure, too.
    """
    files = FileSet(layouts, engine=engine, durable=durable, replace=replace)
    write_files(files)
    return [files.checksums(index) for index in range(len(layouts))]


def write_files(files: FileSet) -> None:
    """Write them, as write_layouts does."""

    def job() -> None:
        files.stage()
        files.finish()

    try:
        _run(job, files.cancel)
    except BaseException:
        files.discard()  # also when the job never began
        raise


def read_layouts(layouts: Sequence[FileLayout], *, engine: Engine | None = None, verify: bool = True) -> None:
    """Fill the memory of `layouts`, from the page cache those that it holds already.

    Raises Corrupt with `layout` and `checksum` for a checksum that differs.
    """
    read = FileReader(layouts, engine=engine, verify=verify, direct="unless_cached")
    _run(read.run, read.cancel)


def _run(job: Callable[[], None], cancel: Callable[[], None]) -> None:
    if threading.get_ident() != threading.main_thread().ident:
        job()  # no signal handler runs here
        return
    Work(job, cancel).result()
