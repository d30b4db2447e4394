"""Which directory owns a file on a volume: it alone may remove the file; a copy of the directory may not.

A copy made with `cp -a` has the same links and contents. So the name of a file identifies the directory that
created it: by the directory's inode and birth time, which a copy does not share, and by its device or path.
Snapshots and clones of filesystems share inode and birth time, but not device and path. A move changes the
path; a restart may change the number of the device, which another device may then have.
"""

import ctypes
import hashlib
import os
import struct
import uuid
from pathlib import Path

from trunkline._boot_id import boot_id

_MARK_DIGITS = 10  # of each of two marks
_RANDOM_DIGITS = 32 - 2 * _MARK_DIGITS

_AT_FDCWD = -100
_STATX_BTIME = 0x800
_STATX_BYTES = 256
_STATX_BTIME_OFFSET = 80


def new_file_id(directory: Path) -> str:
    """Return 32 new, unique hexadecimal digits, by which owns() recognizes the directory."""
    marks = _marks_of(directory)
    digits = uuid.uuid4().hex
    return digits if marks is None else marks[0] + marks[1] + digits[-_RANDOM_DIGITS:]


def owns(directory: Path, file_id: str) -> bool:
    """Whether the directory created the file; False if that is unknown (an earlier version created it)."""
    marks = _marks_of(directory)
    if marks is None:
        return False
    return file_id[:_MARK_DIGITS] == marks[0] or file_id[_MARK_DIGITS : 2 * _MARK_DIGITS] == marks[1]


def _marks_of(directory: Path) -> tuple[str, str] | None:
    """Return marks of the directory by device and by path; None if its birth time is unknown."""
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
        return boot_id()
    except OSError:
        return uuid.uuid4().hex  # matches nothing: only the path identifies the directory


def _mark(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_MARK_DIGITS]


def _birth_of(path: Path) -> int | None:
    """Return a directory's birth time in nanoseconds since 1970; None if it is not recorded."""
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
