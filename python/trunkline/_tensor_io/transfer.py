"""Writes and reads FileLayouts in a separate thread, so that Ctrl-C ends that and cleans up."""

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
        """`cancel`: makes the job end soon."""
        self._job: Callable[[], None] | None = job
        self._cancel = cancel
        self._claim = Claim()  # taken by its thread, or by the one that waits for it, which then abandons it
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
        del job  # so that its memory is freed before the flag is set

    def result(self) -> None:
        """Run the job, and raise its error.

        If a signal handler raises, the job is cancelled first: when this raises, the job has ended, also if
        the signal came while the thread was being started.
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
    layouts: Sequence[FileLayout],
    *,
    engine: Engine | None = None,
    durable: bool = True,
    replace: bool = True,
    access_of: "str | None" = None,
    watch: Callable[[FileSet | None], None] = lambda files: None,
) -> list[list[int]]:
    """Write all of `layouts` and return their checksums.

    Each file appears complete, and with `durable` survives a power failure. `access_of`: a file whose owner,
    group, mode and ACL new files get; they do not replace it, but take its place. `watch`: called with the
    files before they are written, so that another thread can cancel that, and with None afterwards.
    """
    files = FileSet(layouts, engine=engine, durable=durable, replace=replace, access_of=access_of)
    try:
        watch(files)
        write_files(files)
    finally:
        watch(None)
    return [files.checksums(index) for index in range(len(layouts))]


def write_files(files: FileSet) -> None:
    """Write the files like write_layouts()."""

    def job() -> None:
        files.stage()
        files.finish()

    try:
        _run(job, files.cancel)
    except BaseException:
        _discard(files)  # also when the job never began
        raise


def _discard(files: FileSet) -> None:
    """Remove what was written, once no transfer is in flight.

    The main thread only waits while another thread does it, so that Ctrl-C ends the wait for a device that
    hangs. The removal continues.
    """
    if threading.get_ident() != threading.main_thread().ident:
        files.discard()
        return
    done = Flag()
    try:
        start_thread(files.discard, done)
    except RuntimeError:  # no thread can be started
        files.discard()
        return
    done.wait()


def read_layouts(layouts: Sequence[FileLayout], *, engine: Engine | None = None, verify: bool = True) -> None:
    """Fill the memory of `layouts`; files that are in the page cache are read from there.

    Raises Corrupt with `layout` and `checksum` for a checksum that differs.
    """
    read = FileReader(layouts, engine=engine, verify=verify, direct="unless_cached")
    _run(read.run, read.cancel)


def _run(job: Callable[[], None], cancel: Callable[[], None]) -> None:
    if threading.get_ident() != threading.main_thread().ident:
        job()  # no signal handler runs here
        return
    Work(job, cancel).result()
