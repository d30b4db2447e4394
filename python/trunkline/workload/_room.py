"""Whether a file system has room for what is about to be written."""

import errno
import os
from pathlib import Path

from trunkline._errors import exception_of


def require_room(directory: Path, nbytes: int, what: str, todo: str) -> None:
    """Raise OSError if the file system of a directory has less room. `what`: ends with "needs" or "need"."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise exception_of(
            "system",
            errno.ENOSPC,
            f"{what} {nbytes / 1e9:.2f} GB in {directory}, which has {free / 1e9:.2f} GB left; {todo}",
            str(directory),
        )
