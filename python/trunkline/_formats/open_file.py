"""Open files that are written to from where they are."""

import errno
import io
from typing import Any, Protocol, TypeGuard


class BinaryFile(Protocol):
    """A file that was opened for writing bytes, or anything else that accepts them."""

    def write(self, data: Any, /) -> Any:
        """Write bytes, and return how many were written, or None for all."""


def is_open_file(value: object) -> TypeGuard[BinaryFile]:
    """Whether the value is an open file, or anything else with a method write()."""
    return hasattr(value, "write")


def check_binary(file: BinaryFile) -> None:
    """Raise TypeError for a file of text, ValueError for one that was opened for reading."""
    if isinstance(file, io.TextIOBase):
        raise TypeError(
            f'path: must be a path, or a file opened for writing bytes ("wb"), not {type(file).__name__}'
        )
    if isinstance(file, io.IOBase) and not file.closed and not file.writable():
        name = getattr(file, "name", None) or f"the {type(file).__name__}"
        raise ValueError(f'path: {name} was opened for reading; open it with "wb"')


def write_all(file: BinaryFile, data: "bytes | bytearray | memoryview") -> None:
    """Write all bytes: unbuffered files (io.RawIOBase) may write fewer at once.

    Raises BlockingIOError if the file accepts none, as one does that is not to block, and TypeError if
    write() returns neither None nor how many bytes it got: whether it has written them is not known then.
    """
    view = memoryview(data).cast("B")
    is_raw = isinstance(getattr(file, "file", file), io.RawIOBase)  # also in a wrapper of tempfile
    while len(view):
        written = file.write(view)
        if not is_raw:
            _check_written(file, written, len(view))
            return
        if not written:  # None or 0
            raise BlockingIOError(
                errno.EAGAIN, "the file accepts no more bytes now, as one does that is opened not to block"
            )
        view = view[written:]


def _check_written(file: BinaryFile, written: Any, nbytes: int) -> None:
    """Raise TypeError unless write() has returned that it has written all bytes."""
    if written is None or (type(written) is int and written == nbytes):
        return
    raise TypeError(
        f"path: write() of {type(file).__name__} returned {written!r} for {nbytes} bytes, and must return "
        f"{nbytes} or None once it has written them all; what is written is not complete. Pass an object "
        "whose write() does so, or save to a path"
    )


class WholeWriter:
    """What a library writes to that ignores how much of its bytes was written, and may not survive errors.

    After the first error it discards what comes; the caller raises `error` at the end.
    """

    def __init__(self, file: BinaryFile) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: "bytes | bytearray | memoryview") -> int:
        """Write all bytes, or note the error; return how many there were."""
        if self.error is None:
            try:
                write_all(self._file, data)
            except BaseException as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Flush the file, if it can be flushed."""
        if self.error is None and hasattr(self._file, "flush"):
            self._file.flush()
