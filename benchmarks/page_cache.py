"""Files out of and in the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def make_cold(paths: Iterable[Path]) -> None:
    """Write files, and all files in folders, back to the disk, and drop them from the page cache."""
    for path in paths:
        for each in filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path]:
            with each.open("rb") as file:
                os.fsync(file.fileno())  # what is not written yet is not dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_warm(paths: Iterable[Path]) -> None:
    """Let the page cache hold the files."""
    for path in paths:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
