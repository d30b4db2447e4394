"""Which files beside the data are the library's own: indexes, and files that are being written."""

import os

MAGIC = b"trunkline index\n"
ALIGNMENT = 4096  # of the arrays in an index, and of its size


def is_index(path: str | bytes) -> bool:
    """Whether a file begins like an index. Raises OSError."""
    # O_NONBLOCK: a pipe without a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return os.read(descriptor, len(MAGIC)) == MAGIC
    finally:
        os.close(descriptor)
