"""Remembers which files a check found nothing in, so that it need not read them again.

A record belongs to a command and names every file that the command read, with a digest of their contents: it
holds until one of them changes. Only silence is remembered; what a check objects to, it says each time. Paths
in the tree are kept relative to it, so that all copies of the tree share the records.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_KEPT_SECONDS = 30 * 24 * 3600  # for records that nothing has used


@cache
def _digest(path: Path) -> str:
    """Of the file's contents; empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest_of_all(paths: Iterable[Path]) -> str:
    return hashlib.sha256("\n".join(map(_digest, paths)).encode()).hexdigest()


class CleanRecords:
    """Records in a folder, of commands on files of the tree at `root`. Threads may share it."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder = folder
        self._root = root.resolve()

    def holds(self, command: str) -> bool:
        """Whether the command found nothing when it read what its files hold now."""
        path = self._path(command)
        try:
            record = json.loads(path.read_text())
            names, digest = record["files"], record["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if _digest_of_all(self._root / name for name in names) != digest:
            return False
        path.touch()
        return True

    def add(self, command: str, files: Iterable[Path], started: float) -> None:
        """Remember that the command, which began at `started` (time.time()), found nothing in these files.

        Nothing is remembered if one of them has changed since: nobody knows what the command read.
        """
        names = sorted({self._name(file) for file in files})
        paths = [self._root / name for name in names]
        if not all(path.is_file() and path.stat().st_mtime < started for path in paths):
            return
        record = {"files": names, "digest": _digest_of_all(paths)}
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(command)
        written = path.with_suffix(f".{time.monotonic_ns()}")
        written.write_text(json.dumps(record))
        written.replace(path)

    def prune(self) -> None:
        """Remove the records that nothing has used for a month."""
        for path in self._folder.glob("*"):
            if path.stat().st_mtime < time.time() - _KEPT_SECONDS:
                path.unlink(missing_ok=True)

    def _path(self, command: str) -> Path:
        """Of the record of a command, which is the same wherever the tree is."""
        key = command.replace(str(self._root), ".")
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _name(self, file: Path) -> str:
        resolved = file.resolve()
        return str(resolved.relative_to(self._root) if resolved.is_relative_to(self._root) else resolved)
