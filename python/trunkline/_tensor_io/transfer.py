"""Writing and reading FileLayouts: in a thread of its own, so that Ctrl-C ends it and cleans up."""

import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trunkline._core import Engine, FileLayout, FileReader, FileSet
from trunkline._errors import exception_of
from trunkline._tensor_io.background import Claim, start_thread
from trunkline._tensor_io.flag import Flag

# "s3://bucket", or "s3:/bucket", which pathlib makes of it; a single letter is no scheme that anyone uses.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(/?)")


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
    """Write all of `layouts`; each file appears whole, with `durable` for good. Returns their checksums."""
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

    Raises Corrupt with `layout` and `sum` for a checksum that differs.
    """
    read = FileReader(layouts, engine=engine, verify=verify, direct="unless_cached")
    _run(read.run, read.cancel)


def _run(job: Callable[[], None], cancel: Callable[[], None]) -> None:
    if threading.get_ident() != threading.main_thread().ident:
        job()  # no signal handler runs here
        return
    Work(job, cancel).result()


def path_name(path: Any, argument: str = "path") -> str:
    """Return a path as str; `argument` is what the caller's user knows it by.

    Raises TypeError, and ValueError for a URL or a "~" that the caller forgot to expand.
    """
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{argument}: must be str, bytes or os.PathLike, not {type(path).__name__}") from None
    check_is_local(name, argument)
    return name


def check_is_local(name: str, argument: str) -> None:
    """Raise ValueError for a URL, and for "~" where there is no directory of that name.

    Otherwise they would be folders of these names in the working directory, where nobody looks for them.
    """
    first = name.partition("/")[0]
    url = _URL.match(name)
    if url and (url[1] or not os.path.isdir(first)):  # noqa: PTH112 - as the kernel takes it
        if first.lower() == "file:":
            instead = "pass the path without file://"
        else:
            instead = "use a path on a mounted filesystem, and copy the files from there or to it"
        raise ValueError(f"{argument}: {name} is a URL, and not the path of a file or directory; {instead}")
    # What is no user's home stays as it is ("~backup.pt").
    if first.startswith("~") and not os.path.isdir(first) and os.path.expanduser(name) != name:  # noqa: PTH111, PTH112
        raise ValueError(
            f"{argument}: {name} begins with {first}, which only shells replace by the home directory; pass "
            f"os.path.expanduser({name!r}), or ./{name} for a directory of that name"
        )


def absolute_path(path: Any, argument: str = "path") -> str:
    """Return a path that means the same after a change of the working directory.

    For what is used after the call that it was given to: a save in the background of a relative path would
    end wherever the process is by then. Symbolic links and ".." stay as they are.
    """
    name = path_name(path, argument)
    if not name:
        raise exception_of("system", errno.ENOENT, f"{argument}: is an empty path", name)
    if name.startswith("/"):
        return name
    try:
        # Not a Path, which would drop a trailing slash.
        return f"{os.getcwd()}/{name}"  # noqa: PTH109
    except FileNotFoundError:
        raise exception_of(
            "system",
            errno.ENOENT,
            f"{argument}: {name} is relative, and the working directory of the process does not exist any "
            "more (ENOENT); pass an absolute path, or change to a directory that exists (os.chdir)",
            name,
        ) from None
