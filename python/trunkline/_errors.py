"""The exceptions of the package, and the mapping from the library's errors to them."""

import builtins
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Error(OSError):
    """Base of the package's exceptions; the message says what failed, on which file, why, and what to do.

    An OSError: `errno` (None if none applies), `strerror` (the message), `filename` (None if no file is
    concerned; `file` is the same). An error of a system call is also the builtin subclass for its errno, for
    example FileNotFoundError.
    """

    def __init__(self, *args: Any) -> None:
        """As OSError: errno, message, path. A single argument is the message.

        torch raises the errors of a DataLoader's worker again with the whole traceback as the only argument.
        """
        super().__init__(*args)
        if len(args) == 1:
            self.strerror = str(args[0])

    @property
    def file(self) -> Any:
        """The path of the file concerned, like `filename`."""
        return self.filename

    def __str__(self) -> str:
        return "" if self.strerror is None else str(self.strerror)


class Corrupt(Error):
    """Stored bytes contradict their checksum, or other data recorded about them.

    `file` is the path (like `filename`), `tensor` the name of the tensor, `chunk` the number of the chunk in
    it; each is None if unknown.
    """

    tensor: str | None = None
    chunk: int | None = None


class Unsupported(Error):
    """The request is not supported, by this machine, filesystem or build; the message says what was tried."""


class Cancelled(Error):
    """The operation was cancelled before all of it was sent."""


class Timeout(Error, builtins.TimeoutError):
    """A wait ended before the operation did; the operation goes on."""


class OutOfBudget(Error):
    """The budget of pinned memory cannot hold the request."""


class DeviceError(Error):
    """A GPU or its driver failed; the message has the driver's error."""


class Format(Error):
    """A file does not have the expected format, or has a newer version of it."""


class CutOff(Corrupt, Format):
    """A file is truncated: it is both damaged and not a valid file of its format."""


class EndOfFile(Error):
    """A read reaches past the end of the file."""


class RankError(Error):
    """Another rank failed, made another call, or sends no heartbeats; `rank` says which.

    It is counted within the process group of the Checkpointer: torch.distributed.get_global_rank(group, rank)
    returns the global rank.
    """

    rank: int | None = None
    is_cancellation = False  # of a save that was cancelled there


# Named like the builtin exceptions that they derive from: a traceback shows trunkline.FileNotFoundError.
class FileNotFoundError(Error, builtins.FileNotFoundError):  # noqa: A001
    """The file or directory does not exist."""


class FileExistsError(Error, builtins.FileExistsError):  # noqa: A001
    """The file or directory already exists."""


class PermissionError(Error, builtins.PermissionError):  # noqa: A001
    """The user lacks permission."""


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


def errno_reason(code: int) -> str:
    """Describe an errno as messages of the library do: "no such file or directory (ENOENT)"."""
    text = os.strerror(code)
    if not text[:2].isupper():  # "RPC version wrong" stays
        text = text[:1].lower() + text[1:]
    return f"{text} ({errno.errorcode.get(code, code)})"


def system_error(error: OSError, action: str, path: str) -> Exception:
    """Make the exception of a failed system call: "cannot ACTION: no such file or directory (ENOENT)"."""
    code = error.errno or errno.EIO
    return exception_of("system", code, f"cannot {action}: {errno_reason(code)}{errno_advice(code)}", path)


@contextmanager
def system_errors(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an OSError of the block as system_error() describes it; Errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise system_error(error, action, os.fspath(path)) from None


def errno_advice(code: int) -> str:
    """Return what to do about an errno of a path, to follow errno_reason(); empty for others."""
    if code == errno.ENOENT:
        return "; check the path"
    return "; check the permissions, also of the directories above it" if code == errno.EACCES else ""


def kind_of(error: BaseException) -> str:
    """Return the name of the ErrorKind that the library would give the error."""
    if isinstance(error, ValueError | TypeError):
        return "invalid_argument"
    kinds = {exception_type: kind for kind, exception_type in _BY_KIND.items()}
    return next((kinds[each] for each in type(error).__mro__ if each in kinds), "system")


def add_note(error: BaseException, text: str) -> None:
    """Add a line to the traceback of the error, from Python 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def reword(error: Error, message: str) -> None:
    """Change the message of an error, also when it is pickled."""
    error.strerror = message
    error.args = (message,) if len(error.args) == 1 else (*error.args[:1], message, *error.args[2:])


# Tracebacks and pickles name them as in the package's public namespace.
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
