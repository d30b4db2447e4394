"""Files that appear under their names complete and durable, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from trunkline import _core
from trunkline._errors import system_errors


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yield an empty file, which takes the place of `path` durably when the block ends without an error.

    Raises an Error that names `path` if it cannot be written.
    """
    replacement = _core.ReplacementFile(path)
    try:
        with system_errors(f"write {path}", path), open(replacement.fileno(), "wb", closefd=False) as file:
            yield file
        replacement.finish()
    finally:
        replacement.discard()
