"""Open files that are written to from where they are."""

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
    """Write all bytes: unbuffered files may write fewer at once."""
    view = memoryview(data).cast("B")
    while len(view):
        written = file.write(view)
        if not isinstance(written, int) or written >= len(view):
            return
        view = view[written:]
