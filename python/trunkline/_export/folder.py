"""A folder of files that appears at once, complete.

1. It is written under a temporary name beside its own, .NAME.trunkline-RANDOM.tmp, and locked meanwhile.
2. Its files and the folder itself are synced.
3. It is renamed. The kernel refuses to replace a folder that is not empty.
What a killed process leaves behind, which nobody locks, is removed by the next export to the same name.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trunkline._core import fsync_directory
from trunkline._errors import exception_of, system_error
from trunkline._flock import DirectoryLock


def check_folder(path: str) -> None:
    """Raise an error for a path where no folder can appear: a file, or a folder that is not empty."""
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):  # noqa: PTH112
        raise exception_of(
            "system", errno.ENOTDIR, f"cannot write the folder {path}: a file has that name", path
        )
    if os.listdir(path):  # noqa: PTH208
        raise _not_empty(path)


def _not_empty(path: str) -> Exception:
    return exception_of(
        "system",
        errno.ENOTEMPTY,
        f"cannot write the folder {path}: it exists and is not empty; name another one, or remove it first",
        path,
    )


@contextmanager
def new_folder(path: str) -> Iterator[Path]:
    """Make a folder to fill, which gets the name `path` at the end, durably; after an error nothing is left.

    Raises the errors of check_folder().
    """
    check_folder(path)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        folder = target.with_name(f".{target.name}.trunkline-{secrets.token_hex(8)}.tmp")
        folder.mkdir()
    except OSError as error:
        raise system_error(error, f"write the folder {path}", path) from None
    try:
        with DirectoryLock(folder) as lock:
            with suppress(OSError):  # a filesystem without locks
                lock.try_lock()
            yield folder
            fsync_directory(str(folder))
            _rename(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    fsync_directory(str(target.parent))


def _rename(folder: Path, path: str) -> None:
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process made it meanwhile
            raise _not_empty(path) from None
        raise system_error(error, f"rename {folder} to {path}", path) from None


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes have left of folders of this name."""
    abandoned = re.compile(re.escape(f".{target.name}.trunkline-") + r"[0-9a-f]{16}\.tmp")
    for name in os.listdir(target.parent):  # noqa: PTH208
        if abandoned.fullmatch(name):
            with suppress(OSError), DirectoryLock(target.parent / name) as lock:
                if lock.try_lock():
                    shutil.rmtree(lock.directory, ignore_errors=True)
