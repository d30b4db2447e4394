"""The exceptions of the package, and the one mapping from the library's errors to them."""

import builtins
import errno
from typing import Any


class Error(OSError):
    """What went wrong, on which file, and what to try next.

    An OSError: `errno` (None where no errno fits), `strerror` (the message), `filename` (None where no file
    is concerned; `file` is the same). An error of a system call is also the builtin subclass for its errno,
    FileNotFoundError for example.
    """

    @property
    def file(self) -> Any:
        """The path of the file that is concerned, as `filename`."""
        return self.filename

    def __str__(self) -> str:
        return str(self.strerror)


class Corrupt(Error):
    """Stored bytes contradict what was recorded about them.

    `file` is where (a path, as `filename`), `tensor` the name of the tensor, `chunk` the number of the chunk
    in it; each is None when not known.
    """

    tensor: str | None = None
    chunk: int | None = None


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


class RankError(Error):
    """Another rank failed, made another call, or shows no sign of life; `rank` says which.

    It is counted within the process group of the Checkpointer: torch.distributed.get_global_rank(group, rank)
    is the rank of all processes.
    """

    rank: int | None = None
    is_cancellation = False  # of a save that was cancelled there


# Named as the builtin exceptions that they also are: a traceback says trunkline.FileNotFoundError.
class FileNotFoundError(Error, builtins.FileNotFoundError):  # noqa: A001
    """There is no such file or directory."""


class FileExistsError(Error, builtins.FileExistsError):  # noqa: A001
    """There is such a file or directory already."""


class PermissionError(Error, builtins.PermissionError):  # noqa: A001
    """This user may not do that."""


class IsADirectoryError(Error, builtins.IsADirectoryError):  # noqa: A001
    """A directory is where a file is needed."""


class NotADirectoryError(Error, builtins.NotADirectoryError):  # noqa: A001
    """A file is where a directory is needed."""


_BY_ERRNO: dict[int, type[Error]] = {
    errno.ENOENT: FileNotFoundError,
    errno.EEXIST: FileExistsError,
    errno.EACCES: PermissionError,
    errno.EPERM: PermissionError,
    errno.EISDIR: IsADirectoryError,
    errno.ENOTDIR: NotADirectoryError,
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


def add_note(error: BaseException, text: str) -> None:
    """Add a line to what a traceback shows of the error, from Python 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def reword(error: Error, message: str) -> None:
    """Change the message of an error, also in what is pickled."""
    error.strerror = message
    error.args = (*error.args[:1], message, *error.args[2:])


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
    RankError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
):
    _public.__module__ = "trunkline"
