"""Where a pack lies, and whose the files are that are there already. docs/formats/pack.md."""

import errno
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trunkline import _core
from trunkline._core import File, Volume
from trunkline._errors import exception_of
from trunkline._flock import DirectoryLock
from trunkline._formats.safetensors.loader import Header
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming.layout import MARK

WEIGHTS = "weights.safetensors"
_DESCRIPTOR = f"{WEIGHTS}.stripe"  # docs/formats/stripe.md
MARK_BYTES = 4096  # of a file hold its metadata, and lie in the first directory of several
_METADATA = '{"__metadata__":'  # with which the head of a pack begins
_LOCK_SECONDS = 0.1  # between two attempts
_SILENT_SECONDS = 30.0  # of waiting, which may take as long as another process makes a pack


@dataclass(frozen=True)
class PackLocation:
    """Where a pack is: its manifest in the first directory, its weights in all of them."""

    directories: tuple[Path, ...]

    def open(self, mode: str = "r") -> File:
        """Open the weights."""
        if self._volume is None:
            return _core.open(self.directories[0] / WEIGHTS, mode)  # type: ignore[arg-type]
        return self._volume.open(WEIGHTS, mode)  # type: ignore[arg-type]

    @property
    def shown(self) -> str:
        """The directories, for messages."""
        return ", ".join(map(str, self.directories))

    @property
    def _volume(self) -> Volume | None:
        if len(self.directories) == 1:
            return None
        return Volume([str(each) for each in self.directories])

    def remove(self) -> None:
        """Remove what is there; first the manifest, so that there is never one without its weights."""
        manifest = self.directories[0] / pack_manifest.NAME
        with suppress(FileNotFoundError):
            manifest.unlink()
            _core.fsync_directory(self.directories[0])
        self.remove_weights()

    def remove_weights(self) -> None:
        """Remove the weights that are there, whole or not."""
        volume = self._volume
        with suppress(FileNotFoundError):
            if volume is None:
                (self.directories[0] / WEIGHTS).unlink()
            else:
                volume.remove(WEIGHTS)

    @contextmanager
    def lock(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold others off who want to make a pack in any of these directories; wait for those who do.

        The directories are made. Those of former() are locked too. Yields False where others hold a lock and
        that is not waited for.
        """
        for directory in self.directories:
            directory.mkdir(parents=True, exist_ok=True)
        while True:
            wanted = self._to_lock()
            with _locked(wanted, wait) as locked:
                if not locked or self._to_lock() == wanted:
                    yield locked
                    return

    def _to_lock(self) -> dict[tuple[int, int], Path]:
        former = self.former()
        directories = self.directories + (former.directories if former else ())
        return {_identity(directory): directory for directory in directories}

    def former(self) -> "PackLocation | None":
        """Return where the pack of the manifest that is here has its weights, if that is elsewhere.

        None too where that is not known: the manifest of a striped one may be old, or a copy. Raises Format.
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

    def check_is_free(self, headers: Sequence[Header]) -> "PackLocation | None":
        """Raise an error where anything else than an older pack of this place is in the way of one.

        Returns former() if its weights are there: they are to be removed. The place is locked, and the
        manifest in it, if any, that of the same model.
        """
        former = self.former()
        if former is not None and not former._holds_weights_of_a_pack(headers):
            former = None
        if len(self.directories) == 1:
            weights = self.directories[0] / WEIGHTS
            descriptor = self.directories[0] / _DESCRIPTOR
            if not _is_free(weights, headers):
                raise _taken(weights, "is there, and no part of a pack")
            if os.path.lexists(descriptor) and former is None:
                raise _taken(descriptor, "is there, of a file that is striped over several directories")
            return former
        _ = self._volume  # raises an error for directories that are none
        for directory in self.directories[1:]:
            if os.path.lexists(directory / pack_manifest.NAME):
                raise _taken(directory / pack_manifest.NAME, "is there, of a pack with other directories")
        self._check_striped(headers)
        return former

    def _holds_weights_of_a_pack(self, headers: Sequence[Header]) -> bool:
        """Whether they are there in all directories, and may be removed."""
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
        """Raise an error unless what is there of a striped file is a pack's, and lies in these directories.

        The descriptors tell: they are written from the first to the last before there are members, and
        removed from the last to the first when there are none.
        """
        descriptors = [directory / _DESCRIPTOR for directory in self.directories]
        present = [os.path.lexists(descriptor) for descriptor in descriptors]
        found = [_described(descriptor) for descriptor in descriptors]
        for index, descriptor in enumerate(descriptors):
            expected = (found[0] or ("",))[0], index, len(descriptors)
            if present[index] and found[index] != expected:
                raise _taken(descriptor, "is there, of a file that is striped over other directories")
        complete = all(present)
        ours = complete and _is_marked(self._members[0])
        for member, described in zip(self._members, present, strict=True):
            if not os.path.lexists(member):
                continue
            if described and not complete:
                raise _taken(member, "is there, of a file that is striped over other directories")
            if not complete or not (ours or _is_empty(member)) or _is_one_of(member, headers):
                raise _taken(member, "is there, and no part of a pack")


@contextmanager
def _locked(directories: dict[tuple[int, int], Path], wait: bool) -> Iterator[bool]:
    with ExitStack() as stack:
        locked = True
        for identity in sorted(directories):  # in the same order by all, who else would wait for each other
            lock = stack.enter_context(DirectoryLock(directories[identity]))
            until_warned = time.monotonic() + _SILENT_SECONDS
            with suppress(OSError):  # a filesystem without locks
                while not (locked := lock.take()) and wait:
                    if time.monotonic() > until_warned:
                        _warn_of_waiting(directories[identity])
                        until_warned = math.inf
                    time.sleep(_LOCK_SECONDS)
            if not locked:
                break
        yield locked


def _warn_of_waiting(directory: Path) -> None:
    warnings.warn(
        f"waiting for another process that has a lock (flock) on {directory}, to make a pack there; "
        f"`lslocks` or `fuser -v {directory}` shows which. If it is `flock` that runs this program, this "
        "waits for ever: interrupt it, and have `flock` lock a file beside the directory "
        f"(flock {directory}.lock ...)",
        RuntimeWarning,
        stacklevel=2,
    )


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _taken(path: Path, how: str) -> Exception:
    message = f"{path} {how}; give another directory for the pack, or remove it if nobody needs it"
    return exception_of("system", errno.EEXIST, message, str(path))


def _is_free(weights: Path, headers: Sequence[Header]) -> bool:
    """Whether nobody has the name, or the weights of a pack do, whole or what a crash left of them."""
    if not os.path.lexists(weights):
        return True
    return not _is_one_of(weights, headers) and (_is_empty(weights) or _is_marked(weights))


def _is_one_of(path: Path, headers: Sequence[Header]) -> bool:
    return path.exists() and any(path.samefile(header.path) for header in headers)


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _is_marked(path: Path) -> bool:
    """Whether the file begins as a pack does: that is made durable before anything else is written."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, MARK_BYTES - 8)).decode(errors="replace")
        if not text.startswith(_METADATA):
            return False
        metadata, _ = json.JSONDecoder().raw_decode(text, len(_METADATA))
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return isinstance(metadata, dict) and MARK in metadata


def _described(descriptor: Path) -> tuple[str, int, int] | None:
    """Return id, member and number of members, or None for what is not a descriptor."""
    try:
        found = json.loads(descriptor.read_bytes())
        return str(found["id"]), found["member"], found["members"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
