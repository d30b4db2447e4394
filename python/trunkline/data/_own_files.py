"""Which files beside the data are the library's own: indexes, and files that are being written."""

import os
import stat

MAGIC = b"trunkline index\n"
ALIGNMENT = 4096  # of the arrays in an index, and of its size

_PREFIX = b".trunkline-"


def is_index(path: str | bytes) -> bool:
    """Whether a file begins like an index. Raises OSError."""
    # O_NONBLOCK: a pipe without a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return os.read(descriptor, len(MAGIC)) == MAGIC
    finally:
        os.close(descriptor)


class OwnFiles:
    """Recognizes the library's own files, which are never data."""

    def __init__(self, cache: str | None) -> None:
        """`cache`: where the user wants the index; the file there may be a damaged one."""
        self._cache: tuple[int, int] | None = None
        if cache is None:
            return
        try:
            status = os.stat(cache)  # noqa: PTH116
            if stat.S_ISREG(status.st_mode) and is_index(cache):
                self._cache = (status.st_dev, status.st_ino)
        except OSError:
            pass  # shows when the index is kept there

    def has_temporary_name(self, path: bytes) -> bool:
        """Whether a path that was given is one of our hidden files, which may be gone by now."""
        if not os.path.basename(path).startswith(_PREFIX):  # noqa: PTH119
            return False
        try:
            return not stat.S_ISDIR(os.stat(path).st_mode)  # noqa: PTH116
        except OSError:
            return True

    def has(self, path: bytes, status: os.stat_result) -> bool:
        """Whether a file is our own. Few files have the size of an index: the others are not opened."""
        if (status.st_dev, status.st_ino) == self._cache:
            return True
        if status.st_size == 0 or status.st_size % ALIGNMENT != 0:
            return False
        try:
            return is_index(path)
        except OSError:
            return False  # reading it as data says why it cannot be read
