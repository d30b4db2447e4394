"""The exceptions of the package, and the one mapping from the library's errors to them."""

import builtins
import errno
from typing import Any


class Error(OSError):
    """What went wrong, on which file, and what to try next.

    An OSError: `errno` (None where no errno fits), `strerror` (the message), `filename` (None where no file
    is concerned). An error of a system call is also the builtin subclass for its errno, FileNotFoundError for
    example.
    """

    def __str__(self) -> str:
        return str(self.strerror)


class Corrupt(Error):
    """Stored bytes contradict what was recorded about them.

    `file` is where (a path, as `filename`), `tensor` the name of the tensor, `chunk` the number of the chunk
    in it; each is None when not known.
    """

    tensor: str | None = None
    chunk: int | None = None

    @property
    def file(self) -> Any:
        """The path of the corrupt file, as `filename`."""
        return self.filename


class Unsupported(Error):
    """This machine, filesystem or build cannot do it; the message says what was tried."""


class Cancelled(Error):
    """The operation was cancelled before all of it was sent."""


class Timeout(Error, builtins.TimeoutError):
    """A wait ended before the operation did; the operation goes on."""


class OutOfBudget(Error):
    """The budget of pinned memory cannot hold the request."""


class DeviceError(Error):
    """A GPU or its driver failed; the message has the driver's error."""


class Format(Error):
    """A file is not of the format that it should be, or of a newer version."""


class CutOff(Corrupt, Format):
    """A file is shorter than it says of itself: not as it was written, and no valid file of its format."""


class EndOfFile(Error):
    """A read reaches past the end of the file."""


class _FileNotFound(Error, builtins.FileNotFoundError):
    pass


class _FileExists(Error, builtins.FileExistsError):
    pass


class _Permission(Error, builtins.PermissionError):
    pass


class _IsADirectory(Error, builtins.IsADirectoryError):
    pass


class _NotADirectory(Error, builtins.NotADirectoryError):
    pass


_BY_ERRNO: dict[int, type[Error]] = {
    errno.ENOENT: _FileNotFound,
    errno.EEXIST: _FileExists,
    errno.EACCES: _Permission,
    errno.EPERM: _Permission,
    errno.EISDIR: _IsADirectory,
    errno.ENOTDIR: _NotADirectory,
}

_BY_KIND: dict[str, type[Error]] = {
    "cancelled": Cancelled,
    "corrupt": Corrupt,
    "device": DeviceError,
    "end_of_file": EndOfFile,
    "format": Format,
    "out_of_budget": OutOfBudget,
    "timed_out": Timeout,
    "unsupported": Unsupported,
}


def exception_of(kind: str, code: int, message: str, path: str) -> Exception:
    """Make the exception of a library error: `kind` is the name of its ErrorKind, `code` its errno or 0."""
    if kind == "invalid_argument":
        return ValueError(message)
    exception_type = _BY_ERRNO.get(code, Error) if kind == "system" else _BY_KIND.get(kind, Error)
    return exception_type(code or None, message, path or None)


# Users know them by the package's name, in tracebacks and in pickles.
for _public in (
    Error,
    Corrupt,
    CutOff,
    Unsupported,
    Cancelled,
    Timeout,
    OutOfBudget,
    DeviceError,
    Format,
    EndOfFile,
):
    _public.__module__ = "trunkline"
