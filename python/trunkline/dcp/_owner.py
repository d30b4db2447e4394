"""Which directory made a file that it reaches by a link: it alone may remove the file, a copy of it may not.

A copy made with `cp -a` has the same links, and the same contents. So the name of a file says which directory
made it: by the inode and the time of birth of that directory, which no copy has, and the device or the path.
Snapshots and clones of filesystems have these two as well, but neither the device nor the path. The path may
change, by a move, and the number of the device after a restart, when it may even be that of another one.
"""

import ctypes
import hashlib
import os
import struct
import uuid
from pathlib import Path

_MARK_DIGITS = 10  # of each of two marks
_RANDOM_DIGITS = 32 - 2 * _MARK_DIGITS

_AT_FDCWD = -100
_STATX_BTIME = 0x800
_STATX_BYTES = 256
_STATX_BTIME_OFFSET = 80


def new_file_id(directory: Path) -> str:
    """Make 32 hexadecimal digits that no file has had, by which owns() knows the directory."""
    marks = _marks_of(directory)
    digits = uuid.uuid4().hex
    return digits if marks is None else marks[0] + marks[1] + digits[-_RANDOM_DIGITS:]


def owns(directory: Path, file_id: str) -> bool:
    """Whether the directory made the file; false where that is not known (an earlier version made it)."""
    marks = _marks_of(directory)
    if marks is None:
        return False
    return file_id[:_MARK_DIGITS] == marks[0] or file_id[_MARK_DIGITS : 2 * _MARK_DIGITS] == marks[1]


def _marks_of(directory: Path) -> tuple[str, str] | None:
    """Return marks of the directory on its device, and at its path; None if the birth is not known."""
    birth = _birth_of(directory)
    if birth is None:
        return None
    status = directory.stat()
    same = f"{status.st_ino} {birth}"
    return (
        _mark(f"{same} device {status.st_dev} boot {_boot_id()}"),
        _mark(f"{same} path {os.path.realpath(directory)}"),
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return uuid.uuid4().hex  # which nobody has: the path has to do


def _mark(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_MARK_DIGITS]


def _birth_of(path: Path) -> int | None:
    """When a directory was made, in nanoseconds since 1970; None where the filesystem does not record it."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):  # of an old C library
        return None
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, ctypes.c_uint(_STATX_BTIME), found) != 0:
        return None
    (mask,) = struct.unpack_from("=I", found)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _STATX_BTIME_OFFSET)
    if not mask & _STATX_BTIME or seconds <= 0:
        return None
    return int(seconds) * 10**9 + int(nanoseconds)
