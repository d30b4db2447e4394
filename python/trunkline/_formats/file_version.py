"""What shows that a file was written to, or replaced, while it is being read."""

import errno
import os
from typing import NamedTuple

from trunkline._errors import exception_of
from trunkline._types import Path


class Version(NamedTuple):
    """Of a file."""

    nbytes: int
    modified: int  # time of modification, in nanoseconds, which programs can set back (touch -r, rsync -t)
    device: int
    inode: int
    changed: int  # time of the last change of anything; 0: not compared

    def of_open_file(self) -> "Version":
        """Return the version for a file that stays open for long, to which links may be made meanwhile."""
        return self._replace(changed=0)


def version_of(path: "Path | int") -> Version | None:
    """Return the version of the file at a path, or of an open file; None if it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return Version(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino, status.st_ctime_ns)


def check_unchanged(path: Path, before: Version | None) -> None:
    """Raise Error if the file at a path was written to since version_of() returned `before`.

    For files without checksums. No error if another file has the path by now, or `before` is None.
    """
    now = version_of(path)
    if before is None or now is None or (now.device, now.inode) != (before.device, before.inode):
        return
    if before.changed == 0:
        now = now.of_open_file()
    if now != before:
        name = os.fsdecode(path)
        raise exception_of(
            "system",
            errno.ESTALE,
            f"{name} was written to while it was loaded, so that tensors may have old and new bytes; load it "
            "again when no process writes to it, and replace files rather than overwrite them",
            name,
        )
