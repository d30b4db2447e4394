"""Whether there is room for a pack, before anything of it is written."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from trunkline._errors import Error
from trunkline._streaming.location import PackLocation


@dataclass(frozen=True)
class Room:
    """The bytes that a pack needs in a filesystem, and those that are free there."""

    directories: tuple[Path, ...]
    needed: int
    free: int


def rooms_of(location: PackLocation, nbytes: int) -> list[Room]:
    """Return the room for a pack of `nbytes` in each filesystem that it would be written to.

    What an earlier pack occupies there counts as free: it is removed first.
    """
    each_bytes = -(-nbytes // len(location.directories))
    removed = location.removable_bytes()
    by_device: dict[int, list[Path]] = {}
    for directory in location.directories:
        by_device.setdefault(_nearest(directory).stat().st_dev, []).append(directory)
    rooms = []
    for directories in by_device.values():
        status = os.statvfs(_nearest(directories[0]))
        free = status.f_bavail * status.f_frsize + sum(removed[each] for each in directories)
        rooms.append(Room(tuple(directories), each_bytes * len(directories), free))
    return rooms


def check_room(location: PackLocation, nbytes: int, model: str, instead: str) -> list[Room]:
    """Return rooms_of(). Raises Error with ENOSPC where a filesystem has too little free space.

    instead: what else than to choose another directory can be done, as the end of a sentence; may be empty.
    """
    rooms = rooms_of(location, nbytes)
    for room in rooms:
        if room.needed > room.free:
            where = ", ".join(map(str, room.directories))
            raise Error(
                errno.ENOSPC,
                f"cannot make a pack of {model}: it needs {room.needed} bytes ({room.needed / 1e9:.3g} GB) "
                f"in {where}, where {room.free} bytes ({room.free / 1e9:.3g} GB) are free; choose another "
                "directory (pack_dir, OUT of `trunkline pack`, or the environment variable TRUNKLINE_CACHE)"
                f"{instead}",
                str(room.directories[0]),
            )
    return rooms


def _nearest(directory: Path) -> Path:
    """Return the directory, or the nearest one above it that exists."""
    return next(each for each in (directory, *directory.parents) if each.exists())
