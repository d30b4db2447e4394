"""What a save does to its directories, besides writing files: making, linking, locking, removing."""

import contextlib
import errno
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from trunkline._core import check_leads_to, fsync_directory
from trunkline._errors import exception_of
from trunkline._flock import DirectoryLock
from trunkline._formats.dcp_names import (
    file_id_of,
    is_data_file_name,
    is_rank_manifest_name,
    manifest_name,
)
from trunkline.dcp._owner import owns
from trunkline.dcp._stored import leftovers

# How long a commit waits for the lock of the directory: longer than the commit of another process
# takes, which writes a manifest and removes the files of an older checkpoint.
LOCK_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.01

_MOST_NAMED = 100  # files in a warning


class OpenDirectories:
    """Directories that a save keeps open, to notice when their paths lead elsewhere.

    One that is moved to another disk, or replaced by a copy, while it is written to would hold a part of the
    save, and the one behind its path the rest.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open them, without leave to read them."""
        self._opened: list[tuple[Path, int]] = []
        self._close = weakref.finalize(self, _close_all, self._opened)
        for path in paths:
            self._opened.append((path, os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)))

    def check(self) -> None:
        """Raise OSError (ESTALE) where one was moved or replaced."""
        for path, descriptor in self._opened:
            check_leads_to(path, descriptor)

    def close(self) -> None:
        """Close them; also done when this object goes."""
        self._close()


def _close_all(opened: list[tuple[Path, int]]) -> None:
    while opened:
        os.close(opened.pop()[1])


def make_directory(path: Path, *, durable: bool) -> bool:
    """Make a directory and those above it, unless they are there; return whether this call made it."""
    missing = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    is_made = False
    for directory in reversed(missing):
        is_made = not directory.exists()
        directory.mkdir(exist_ok=True)
        if durable:
            fsync_directory(directory.parent)
    return is_made


def place_in_volume(directory: Path, volume: Path, name: str) -> Path:
    """Return where to write the file that `directory` shall hold as `name`, which lies in `volume`.

    Whatever lies elsewhere is reached by a link of the same name, which is made before the file, so that
    reading needs no list of volumes, and what a crash leaves can be found from the directory alone.
    """
    path = volume.absolute() / name
    if volume.samefile(directory):  # by whichever of its names: a link would lead to itself
        return directory.absolute() / name
    (directory / name).symlink_to(path)
    return path


def missing_target(path: Path) -> Path | None:
    """Return where a link into a volume leads if nothing is there; None where it is no such link."""
    if not is_data_file_name(path.name) or not path.is_symlink() or path.exists():
        return None
    return path.parent / path.readlink()


def remove_file(directory: Path, name: str) -> None:
    """Remove a file of `directory`, and what it links to; nothing happens if it is not there."""
    target = _target_in_volume(directory, name)
    if target is not None:
        target.unlink(missing_ok=True)
    (directory / name).unlink(missing_ok=True)


def _target_in_volume(directory: Path, name: str) -> Path | None:
    """Return what a link of place_in_volume() leads to; None for other files, and somebody else's links."""
    path = directory / name
    if not is_data_file_name(name) or not path.is_symlink():
        return None
    target = directory / path.readlink()
    return target if target.name == name else None


def remove_quietly(directory: Path, names: Iterable[str]) -> None:
    """Remove files whose removal nothing depends on: the next save tries again."""
    for name in names:
        _remove_or_warn(directory, name)


def remove_leftovers(directory: Path, names: Iterable[str], check: Callable[[], None]) -> None:
    """Remove files of earlier saves, as remove_quietly(); where another directory made them only the links.

    Of a copy (`cp -a`), the original has links to the same files. `check` is called before each removal, and
    ends them where it raises OSError.
    """
    kept = []
    for name in names:
        try:
            check()
        except OSError as error:
            warnings.warn(f"files of earlier checkpoints stay: {error}", RuntimeWarning, 3)
            return
        target = _target_in_volume(directory, name)
        if target is None or owns(directory, file_id_of(name)):
            _remove_or_warn(directory, name)
        elif _remove_or_warn(directory, name, link_only=True) and target.exists():
            kept.append(target)
    if kept:
        shown = ", ".join(map(str, kept[:_MOST_NAMED]))
        if len(kept) > _MOST_NAMED:
            volumes = sorted({str(target.parent) for target in kept[_MOST_NAMED:]})
            shown += f" and {len(kept) - _MOST_NAMED} more in {', '.join(volumes)}"
        warnings.warn(
            f"{directory} may not own files of the checkpoint that this save replaced: it is a copy, or was "
            "restored from one, or an earlier version of trunkline saved it. They stay on their volumes: "
            f"{shown}. Remove them unless another directory has links to them",
            RuntimeWarning,
            stacklevel=3,
        )


def _remove_or_warn(directory: Path, name: str, *, link_only: bool = False) -> bool:
    """Return whether it is removed."""
    try:
        if link_only:
            (directory / name).unlink(missing_ok=True)
        else:
            remove_file(directory, name)
    except OSError as error:
        warnings.warn(f"{directory}: {name} is needed no more but stays: {error}", RuntimeWarning, 3)
        return False
    return True


def remove_torch_metadata(directory: Path, names: Sequence[str], *, durable: bool) -> None:
    """Remove what torch's readers would load an older checkpoint by."""
    for name in names:
        (directory / name).unlink(missing_ok=True)
    if names and durable:
        fsync_directory(directory)


def list_leftovers(directory: Path) -> list[str]:
    """Names of all files that saves made in a directory, but for the manifest of all ranks."""
    return leftovers(os.listdir(directory))  # noqa: PTH208 - names, not paths


def list_manifests(directory: Path) -> list[str]:
    """Names of the manifests by which a directory holds a checkpoint: the common one, or else those of ranks.

    The manifest of a rank beside the common one is left of an older save.
    """
    if (directory / manifest_name(None)).exists():
        return [manifest_name(None)]
    if not directory.is_dir():
        return []
    return sorted(filter(is_rank_manifest_name, os.listdir(directory)))  # noqa: PTH208 - names, not paths


def note_refused(directory: Path, name: str, save_id: str) -> None:
    """Add the save_id of a manifest to the record `name`, where that manifest has made a save fail."""
    with contextlib.suppress(OSError), (directory / name).open("a", encoding="ascii") as file:
        file.write(f"{save_id}\n")


def count_refused(directory: Path, name: str, save_id: str) -> int:
    """Return how many saves a manifest has made fail, of which note_refused() made a record."""
    try:
        text = (directory / name).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return 0
    return text.splitlines().count(save_id)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold back other commits into the directory; does nothing on a filesystem without locks.

    Raises Error (EBUSY) when something else keeps the directory locked.
    """
    with DirectoryLock(directory) as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise exception_of(
                    "system",
                    errno.EBUSY,
                    f"cannot save to {directory}: another process has kept a lock (flock) on that directory "
                    f"for {LOCK_SECONDS:g} s, or another save of this one that a signal handler interrupted; "
                    f"`lslocks` or `fuser -v {directory}` shows which process. If it is "
                    "`flock` that runs this job, have it lock a file beside the directory instead "
                    f"(flock {directory}.lock ...)",
                    str(directory),
                )
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _try_lock(lock: DirectoryLock) -> bool:
    try:
        return lock.take()
    except OSError:  # NFS locks no directories
        return True
