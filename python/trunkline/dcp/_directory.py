"""Operations on the directories of a save: creating, linking, locking, and removing files."""

import contextlib
import errno
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from trunkline._core import check_leads_to, fsync_directory
from trunkline._errors import exception_of, system_error, system_errors
from trunkline._flock import DirectoryLock
from trunkline._formats.dcp_names import (
    file_id_of,
    is_data_file_name,
    is_rank_manifest_name,
    manifest_name,
)
from trunkline._logging import Log
from trunkline._paths import names_in
from trunkline._waits import Wait
from trunkline.dcp._owner import owns
from trunkline.dcp._stored import leftovers

# How long a commit waits for the lock of the directory: longer than the commit of another process
# takes, which writes a manifest and removes the files of an older checkpoint.
LOCK_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.01

_MAX_NAMED = 100  # files in a warning

_log = Log("checkpoint")


class OpenDirectories:
    """Directories that a save keeps open, to notice when their paths lead elsewhere.

    If one is moved to another disk, or replaced by a copy, during a save, it would contain part of the save,
    and the directory that has its path then the rest.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open them with O_PATH, which requires no permission to read."""
        self._opened: list[tuple[Path, int]] = []
        self._close = weakref.finalize(self, _close_all, self._opened)
        for path in paths:
            with system_errors(f"open {path}", path):
                self._opened.append((path, os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)))

    def check(self) -> None:
        """Raise OSError (ESTALE) if one was moved or replaced."""
        for path, descriptor in self._opened:
            check_leads_to(path, descriptor)

    def close(self) -> None:
        """Close them; also done when this object is deleted."""
        self._close()


def _close_all(opened: list[tuple[Path, int]]) -> None:
    while opened:
        os.close(opened.pop()[1])


def make_directory(path: Path, *, durable: bool) -> bool:
    """Create a directory and its parents if missing; return whether this call created it."""
    if path.exists() and not path.is_dir():
        raise exception_of(
            "system", errno.ENOTDIR, f"cannot save to {path}: it is not a directory; name one", str(path)
        )
    missing = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    is_made = False
    for directory in reversed(missing):
        is_made = not directory.exists()
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise system_error(error, f"create the directory {directory}", str(directory)) from None
        if durable:
            fsync_directory(directory.parent)
    return is_made


def place_in_volume(directory: Path, volume: Path, name: str) -> Path:
    """Return where to write the file `name` of `directory` so that it is stored in `volume`.

    A file that is stored elsewhere is reached by a link of the same name, which is created before the file,
    so that reading needs no list of volumes, and leftovers of a crash can be found from the directory alone.
    """
    path = volume.absolute() / name
    if volume.samefile(directory):  # under any of its names: a link would lead to itself
        return directory.absolute() / name
    (directory / name).symlink_to(path)
    return path


def missing_target(path: Path) -> Path | None:
    """Return the target of a dangling link into a volume; None for anything else."""
    if not is_data_file_name(path.name) or not path.is_symlink() or path.exists():
        return None
    return path.parent / path.readlink()


def remove_file(directory: Path, name: str) -> None:
    """Remove a file of `directory`, and its target if it is a link; does nothing if it does not exist."""
    target = _target_in_volume(directory, name)
    if target is not None:
        target.unlink(missing_ok=True)
    (directory / name).unlink(missing_ok=True)


def _target_in_volume(directory: Path, name: str) -> Path | None:
    """Return the target of a link made by place_in_volume(); None for other files and links."""
    path = directory / name
    if not is_data_file_name(name) or not path.is_symlink():
        return None
    target = directory / path.readlink()
    return target if target.name == name else None


def remove_quietly(directory: Path, names: Iterable[str]) -> None:
    """Remove files; if that fails, only warn: the next save tries again."""
    for name in names:
        _remove_or_report(directory, name, _warn)


def remove_leftovers(
    directory: Path,
    names: Iterable[str],
    check: Callable[[], None] = lambda: None,
    report: Callable[[Path, OSError], None] | None = None,
) -> None:
    """Remove files of earlier saves like remove_quietly(); only the links to files of another directory.

    If this directory is a copy (`cp -a`), the original has links to the same files. `check` is called before
    each removal; if it raises OSError, the remaining files stay. `report`: called with each file that cannot
    be removed, instead of a warning.
    """
    report = report or _warn
    kept = []
    for name in names:
        try:
            check()
        except OSError as error:
            warnings.warn(f"could not remove files of earlier checkpoints: {error}", RuntimeWarning, 3)
            return
        target = _target_in_volume(directory, name)
        if target is None or owns(directory, file_id_of(name)):
            _remove_or_report(directory, name, report)
        elif _remove_or_report(directory, name, report, link_only=True) and target.exists():
            kept.append(target)
    if kept:
        shown = ", ".join(map(str, kept[:_MAX_NAMED]))
        if len(kept) > _MAX_NAMED:
            volumes = sorted({str(target.parent) for target in kept[_MAX_NAMED:]})
            shown += f" and {len(kept) - _MAX_NAMED} more in {', '.join(volumes)}"
        warnings.warn(
            f"{directory} may not own files of the checkpoint that this save replaced: it is a copy, or was "
            "restored from one, or an earlier version of trunkline saved it. These files stay on their "
            f"volumes: {shown}. Remove them unless another directory has links to them",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn(path: Path, error: OSError) -> None:
    text = f"{path.parent}: could not remove {path.name}, which is no longer needed: {error}"
    warnings.warn(text, RuntimeWarning, 5)


def _remove_or_report(
    directory: Path, name: str, report: Callable[[Path, OSError], None], *, link_only: bool = False
) -> bool:
    """Return whether it is removed."""
    exists = os.path.lexists(directory / name)
    try:
        if link_only:
            (directory / name).unlink(missing_ok=True)
        else:
            remove_file(directory, name)
    except OSError as error:
        report(directory / name, error)
        return False
    if exists:
        _log.info("removed %s: no checkpoint there needs it any more", directory / name)
    return True


def remove_torch_metadata(directory: Path, names: Sequence[str], *, durable: bool) -> None:
    """Remove the metadata by which torch's readers would load an older checkpoint."""
    for name in names:
        (directory / name).unlink(missing_ok=True)
        _log.info("removed %s: the checkpoint of torch there is replaced (overwrite=True)", directory / name)
    if names and durable:
        fsync_directory(directory)


def list_leftovers(directory: Path) -> list[str]:
    """Return the names of all files that saves created in a directory, except the common manifest."""
    return leftovers(names_in(directory))


def list_manifests(directory: Path) -> list[str]:
    """Return the names of the manifests of a directory's checkpoint: the common one, or else those of ranks.

    A rank's manifest beside the common one is a leftover of an older save.
    """
    if (directory / manifest_name(None)).exists():
        return [manifest_name(None)]
    if not directory.is_dir():
        return []
    return sorted(filter(is_rank_manifest_name, names_in(directory)))


def record_rejected(directory: Path, name: str, save_id: str) -> None:
    """Add the save_id of a manifest that made a save fail to the record `name`."""
    with contextlib.suppress(OSError), (directory / name).open("a", encoding="ascii") as file:
        file.write(f"{save_id}\n")


def count_rejected(directory: Path, name: str, save_id: str) -> int:
    """Return how many failed saves record_rejected() has recorded for the save_id of a manifest."""
    path = directory / name
    try:
        with system_errors(f"read {path}", path):
            text = path.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return 0
    return text.splitlines().count(save_id)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Block other commits into the directory; does nothing on a filesystem without locks.

    Raises Error (EBUSY) if the directory stays locked.
    """
    with DirectoryLock(directory) as lock:
        _acquire(lock)
        yield


def _acquire(lock: DirectoryLock) -> None:
    if _try_lock(lock):
        return
    directory = lock.directory
    deadline = time.monotonic() + LOCK_SECONDS
    with Wait(_log, "wait for the lock of the directory", str(directory), LOCK_SECONDS / 2) as wait:
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise exception_of(
                    "system",
                    errno.EBUSY,
                    f"cannot save to {directory}: another process has held a lock (flock) on that directory "
                    f"for {LOCK_SECONDS:g} s, or a save of this process that a signal handler interrupted "
                    f"has; `lslocks` or `fuser -v {directory}` shows which process. If this job was started "
                    f"by `flock {directory}`, let flock lock a file beside the directory instead "
                    f"(flock {directory}.lock ...)",
                    str(directory),
                )
            wait.check(lambda: f"another process that has locked {directory}")
            time.sleep(_LOCK_POLL_SECONDS)


def _try_lock(lock: DirectoryLock) -> bool:
    try:
        return lock.try_lock()
    except OSError as error:  # NFS does not support locks on directories
        _log.info("%s: committing without a lock: the filesystem supports none: %s", lock.directory, error)
        return True
