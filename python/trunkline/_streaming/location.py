"""Where a pack is stored, and which files there belong to one. docs/formats/pack.md."""

import errno
import json
import math
import os
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path

from trunkline import _core
from trunkline._core import File, Volume
from trunkline._errors import exception_of
from trunkline._flock import DirectoryLock
from trunkline._formats.safetensors.loader import Header
from trunkline._logging import Log
from trunkline._streaming import expert_use
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming.layout import MARK
from trunkline._waits import Wait

_log = Log("stream")

WEIGHTS = "weights.safetensors"
_DESCRIPTOR = f"{WEIGHTS}.stripe"  # docs/formats/stripe.md
MARK_BYTES = 4096  # of a file hold its metadata, and are in the first directory of several
_METADATA = '{"__metadata__":'  # the beginning of a pack's header
_LOCK_RETRY_SECONDS = 0.1  # between two attempts to lock
_WARN_AFTER_SECONDS = 30.0  # of waiting for the lock, which another process holds while it makes a pack


@dataclass(frozen=True)
class PackLocation:
    """The directories of a pack: its manifest is in the first, its weights are in all of them."""

    directories: tuple[Path, ...]

    def open(self, mode: str = "r") -> File:
        """Open the weights."""
        if self._volume is None:
            return _core.open(self.directories[0] / WEIGHTS, mode)  # type: ignore[arg-type]
        return self._volume.open(WEIGHTS, mode)  # type: ignore[arg-type]

    def restrict_access(self, sources: Sequence[str]) -> None:
        """Take permissions from the weights that group and others do not have for all of the files."""
        for member in self._members:
            status = member.stat()
            present = stat.S_IMODE(status.st_mode)
            allowed = stat.S_IRWXU
            allowed |= reduce(and_, (_shared_permissions(path, status.st_gid) for path in sources))
            if present & ~allowed:
                member.chmod(present & allowed)

    @property
    def display_name(self) -> str:
        """The directories, for messages."""
        return ", ".join(map(str, self.directories))

    @property
    def weights_path(self) -> Path:
        """The file of the weights; the first of several."""
        return self._members[0]

    def removable_bytes(self) -> dict[Path, int]:
        """Return the bytes on the disk, by directory, that making a pack here frees at first."""
        found = dict.fromkeys(self.directories, 0)
        for directory, member in zip(self.directories, self._members, strict=True):
            with suppress(OSError):
                found[directory] += member.stat().st_blocks * 512
        return found

    def check_is_pack(self) -> None:
        """Raise an error, which names the file, unless all that remove() would remove belongs to a pack."""
        if len(self.directories) > 1:
            self._check_striped([])
        for member in self._members[:1]:
            if not _is_absent_or_pack(member, []):
                raise exception_of(
                    "system",
                    errno.EEXIST,
                    f"cannot remove the pack in {self.display_name}: {member} is not the weights of a pack; "
                    "nothing was removed",
                    str(member),
                )

    @property
    def _volume(self) -> Volume | None:
        if len(self.directories) == 1:
            return None
        return Volume([str(each) for each in self.directories])

    def remove(self) -> None:
        """Remove the pack; its manifest first, so that there is never a manifest without its weights."""
        manifest = self.directories[0] / pack_manifest.NAME
        with suppress(FileNotFoundError):
            manifest.unlink()
            _core.fsync_directory(self.directories[0])
        with suppress(FileNotFoundError):
            expert_use.remove(self.directories[0])
        self.remove_weights()

    def remove_weights(self) -> None:
        """Remove the weights, complete or not."""
        volume = self._volume
        with suppress(FileNotFoundError):
            if volume is None:
                (self.directories[0] / WEIGHTS).unlink()
            else:
                volume.remove(WEIGHTS)

    @contextmanager
    def lock(self, *, wait: bool = True) -> Iterator[bool]:
        """Lock these directories and those of previous() against other processes that make a pack in them.

        Creates the directories. Yields whether they are locked: False only where another process holds a lock
        and `wait` is False.
        """
        for directory in self.directories:
            directory.mkdir(parents=True, exist_ok=True)
        while True:
            wanted = self._lock_targets()
            with _locked(wanted, wait) as locked:
                if not locked or self._lock_targets() == wanted:
                    yield locked
                    return

    def _lock_targets(self) -> dict[tuple[int, int], Path]:
        previous = self.previous()
        directories = self.directories + (previous.directories if previous else ())
        return {_identity(directory): directory for directory in directories}

    def previous(self) -> "PackLocation | None":
        """Return where the weights of this directory's manifest are, if they are elsewhere.

        None also where that is unknown: the manifest of a striped pack may be old, or a copy. Raises Format.
        """
        manifest = pack_manifest.read(self.directories[0])
        if manifest is None:
            return None
        directories = self.directories[:1]
        if manifest.volumes > 1:
            directories = tuple(map(Path, manifest.directories))
        try:
            identities = [_identity(directory) for directory in directories]
        except OSError:
            return None
        here = [_identity(directory) for directory in self.directories]
        if identities[:1] != here[:1] or identities == here:
            return None
        return PackLocation(directories)

    def check_no_conflict(self, headers: Sequence[Header]) -> "PackLocation | None":
        """Raise an error if making a pack here would overwrite anything but an older pack of this location.

        Returns previous() if its weights exist: the caller removes them. The location must be locked, and its
        manifest, if any, be that of the same model.
        """
        previous = self.previous()
        if previous is not None and not previous._holds_weights_of_a_pack(headers):
            previous = None
        if len(self.directories) == 1:
            weights = self.directories[0] / WEIGHTS
            descriptor = self.directories[0] / _DESCRIPTOR
            if not _is_absent_or_pack(weights, headers):
                raise _conflict(weights, "exists and is not part of a pack")
            if os.path.lexists(descriptor) and previous is None:
                raise _conflict(descriptor, "exists and describes a file striped over several directories")
            return previous
        _ = self._volume  # raises an error for paths that are not directories
        for directory in self.directories[1:]:
            if os.path.lexists(directory / pack_manifest.NAME):
                raise _conflict(directory / pack_manifest.NAME, "belongs to a pack in other directories")
        self._check_striped(headers)
        return previous

    def _holds_weights_of_a_pack(self, headers: Sequence[Header]) -> bool:
        """Whether all directories hold them, and they may be removed."""
        try:
            if len(self.directories) > 1:
                self._check_striped(headers)
                self.open().close()
            return _is_marked(self._members[0]) and not _is_one_of(self._members[0], headers)
        except OSError:
            return False

    @property
    def _members(self) -> list[Path]:
        if len(self.directories) == 1:
            return [self.directories[0] / WEIGHTS]
        return [directory / f"{WEIGHTS}.{index}" for index, directory in enumerate(self.directories)]

    def _check_striped(self, headers: Sequence[Header]) -> None:
        """Raise an error if a striped file here is not a pack, or is striped over other directories.

        The descriptors show that: they are written from the first to the last before there are members, and
        removed from the last to the first once there are none.
        """
        descriptors = [directory / _DESCRIPTOR for directory in self.directories]
        present = [os.path.lexists(descriptor) for descriptor in descriptors]
        found = [_read_descriptor(descriptor) for descriptor in descriptors]
        for index, descriptor in enumerate(descriptors):
            expected = (found[0] or ("",))[0], index, len(descriptors)
            if present[index] and found[index] != expected:
                raise _conflict(descriptor, "describes a file striped over other directories")
        complete = all(present)
        is_pack = complete and _is_marked(self._members[0])
        for member, described in zip(self._members, present, strict=True):
            if not os.path.lexists(member):
                continue
            if described and not complete:
                lacking = ", ".join(
                    str(directory)
                    for directory, there in zip(self.directories, present, strict=True)
                    if not there
                )
                raise _conflict(
                    member,
                    f"is part of a file striped over several directories, of which {lacking} has no part: "
                    "that is another directory, or has lost its part",
                )
            if not complete or not (is_pack or _is_empty(member)) or _is_one_of(member, headers):
                raise _conflict(member, "exists and is not part of a pack")


@contextmanager
def _locked(directories: dict[tuple[int, int], Path], wait: bool) -> Iterator[bool]:
    with ExitStack() as stack:
        locked = True
        for identity in sorted(directories):  # the same order in all processes, which prevents deadlocks
            lock = stack.enter_context(DirectoryLock(directories[identity]))
            locked = _acquire(lock, wait)
            if not locked:
                break
        yield locked


def _acquire(lock: DirectoryLock, wait: bool) -> bool:
    """Acquire the lock if `wait` or if no other process holds it; True if it is acquired."""
    directory = lock.directory
    try:
        if lock.try_lock():
            return True
        if not wait:
            return False
        until_warned = time.monotonic() + _WARN_AFTER_SECONDS
        with Wait(_log, "wait for the lock of a pack", str(directory)) as waiting:
            while not lock.try_lock():
                waiting.check(lambda: f"another process, which makes a pack in {directory}")
                if time.monotonic() > until_warned:
                    _warn_of_waiting(directory)
                    until_warned = math.inf
                time.sleep(_LOCK_RETRY_SECONDS)
    except OSError as error:
        _log.info("%s: making a pack without a lock: the filesystem supports none: %s", directory, error)
    return True


def _warn_of_waiting(directory: Path) -> None:
    warnings.warn(
        f"waiting to make a pack in {directory}: another process holds a lock (flock) on it; `lslocks` or "
        f"`fuser -v {directory}` shows which one. If this program was started by `flock {directory}`, it "
        "waits forever: interrupt it, and let `flock` lock a file beside the directory instead "
        f"(flock {directory}.lock ...)",
        RuntimeWarning,
        stacklevel=2,
    )


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _conflict(path: Path, why: str) -> Exception:
    message = (
        f"cannot make a pack: {path} {why}; use another directory, or remove the file if it is not needed"
    )
    return exception_of("system", errno.EEXIST, message, str(path))


def _is_absent_or_pack(weights: Path, headers: Sequence[Header]) -> bool:
    """Whether there is no such file, or it holds the weights of a pack, complete or cut off by a crash."""
    if not os.path.lexists(weights):
        return True
    return not _is_one_of(weights, headers) and (_is_empty(weights) or _is_marked(weights))


def _is_one_of(path: Path, headers: Sequence[Header]) -> bool:
    return path.exists() and any(path.samefile(header.path) for header in headers)


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _is_marked(path: Path) -> bool:
    """Whether the file begins like a pack: that part is made durable before anything else is written."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return has_mark(file.read(MARK_BYTES))
    except FileNotFoundError:
        return False


def has_mark(data: bytes) -> bool:
    """Whether a file that begins with these bytes (MARK_BYTES of it) begins like a pack."""
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode(errors="replace")
    if not text.startswith(_METADATA):
        return False
    try:
        metadata, _ = json.JSONDecoder().raw_decode(text, len(_METADATA))
    except (ValueError, RecursionError):
        return False
    return isinstance(metadata, dict) and MARK in metadata


def _read_descriptor(descriptor: Path) -> tuple[str, int, int] | None:
    """Return id, member and number of members; None if the file is not a descriptor."""
    try:
        return parse_descriptor(descriptor.read_bytes())
    except (OSError, *NOT_A_DESCRIPTOR):
        return None


NOT_A_DESCRIPTOR = (ValueError, TypeError, KeyError, RecursionError)


def parse_descriptor(text: bytes) -> tuple[str, int, int]:
    """Return id, member and number of members. Raises NOT_A_DESCRIPTOR."""
    found = json.loads(text)
    return str(found["id"]), found["member"], found["members"]


def _shared_permissions(path: str, group: int) -> int:
    """Return what a group, and others, may do with a file, as bits of a mode.

    A group that is not the file's, or for which an access control list decides, may do what all others may.
    """
    status = os.stat(path)  # noqa: PTH116 - a str, as messages show it
    mode = stat.S_IMODE(status.st_mode)
    others = mode & stat.S_IRWXO
    if status.st_gid == group and not _has_access_list(path):
        return mode & (stat.S_IRWXG | stat.S_IRWXO)
    return others << 3 & mode | others


def _has_access_list(path: str) -> bool:
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError:  # none, or the filesystem has no lists
        return False
    return True
