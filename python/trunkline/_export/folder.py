"""A folder of files that appears at once, complete.

1. It is written under a temporary name beside its own, .NAME.trunkline-RANDOM.tmp, and locked meanwhile.
2. If an empty folder has the name already, it gets the owner, mode, ACL and extended attributes of that one,
   before any file is in it: files get what they would get there.
3. Its files and the folder itself are synced.
4. It is renamed. The kernel refuses to replace a folder that is not empty.
What a killed process leaves behind, which nobody locks, is removed by the next export to the same name.
"""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trunkline._core import fsync_directory
from trunkline._errors import exception_of, system_error
from trunkline._flock import DirectoryLock
from trunkline._paths import names_in


def check_folder(path: str) -> None:
    """Raise an error where no folder can appear: at a file, a mount point, a folder that is not empty."""
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):  # noqa: PTH112
        raise exception_of(
            "system", errno.ENOTDIR, f"cannot write the folder {path}: a file has that name", path
        )
    if names_in(path):
        raise _not_empty(path)
    if os.path.ismount(path):
        raise exception_of(
            "system",
            errno.EBUSY,
            f"cannot write the folder {path}: it is a mount point, which cannot be replaced; name a new "
            "folder in it",
            path,
        )


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

    Raises the errors of check_folder(). A symbolic link to an empty folder stays, and leads to the new one.
    """
    check_folder(path)
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        folder = target.with_name(f".{target.name}.trunkline-{secrets.token_hex(8)}.tmp")
        if target.is_dir():
            folder.mkdir(mode=0o700)
            _copy_protection(target, folder)
        else:
            folder.mkdir()
    except OSError as error:
        raise system_error(error, f"write the folder {path}", path) from None
    try:
        with DirectoryLock(folder) as lock:
            with suppress(OSError):  # a filesystem without locks
                lock.try_lock()
            yield folder
            fsync_directory(str(folder))
            _rename(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    fsync_directory(str(target.parent))


def _copy_protection(source: Path, folder: Path) -> None:
    """Give a folder the owner, mode, ACL and extended attributes of another, as far as this user may."""
    status = source.stat()
    for owner, group in ((status.st_uid, -1), (-1, status.st_gid)):
        with suppress(PermissionError):
            os.chown(folder, owner, group)
    for name in os.listxattr(source):
        with suppress(OSError):  # of the system, or of a filesystem that has none
            os.setxattr(folder, name, os.getxattr(source, name))
    folder.chmod(stat.S_IMODE(status.st_mode))  # last: changing the owner may clear bits


def _rename(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process made it meanwhile
            raise _not_empty(str(target)) from None
        raise system_error(error, f"rename {folder} to {target}", str(target)) from None


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes have left of folders of this name."""
    abandoned = re.compile(re.escape(f".{target.name}.trunkline-") + r"[0-9a-f]{16}\.tmp")
    for name in names_in(target.parent):
        if abandoned.fullmatch(name):
            with suppress(OSError), DirectoryLock(target.parent / name) as lock:
                if lock.try_lock():
                    shutil.rmtree(lock.directory, ignore_errors=True)
