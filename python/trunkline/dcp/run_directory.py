"""A directory of checkpoints of trunkline.dcp, one a step: what is there, and how a step is removed.

    DIR/
      step-00000100/      as StorageWriter writes it: a checkpoint exactly when it has a dcp.manifest
      step-00000200/

Whoever saves or removes holds a lock (flock) on DIR; reading needs none. A checkpoint is identified by its
step and the contents of its manifest. Its commit number is in the save_id of the manifest, which begins with
"commit-0000000012-": larger than that of all others in DIR when it was made, so that the latest one is known
although the numbers of steps may go back. A step that StorageWriter alone has saved has none: that counts as
0.

How a step is removed:
1. Its manifests are unlinked, and the folder is synced: from here on it is not a checkpoint.
2. Its shards are removed, with what they link to on volumes if the folder owns it.
3. The folder is removed, unless other files are in it.
A crash in between leaves a folder without manifests, which collect() removes.
"""

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trunkline._core import fsync_directory
from trunkline._errors import Corrupt, Error, Format, exception_of, system_error, system_errors
from trunkline._formats.checkpoint_names import ignored_steps, step_name, step_of
from trunkline._formats.dcp_names import MANIFEST, is_data_file_name, is_rank_manifest_name, is_refused_name
from trunkline._formats.node_names import is_node_directory
from trunkline._logging import Log
from trunkline._paths import names_in
from trunkline.dcp import _directory
from trunkline.dcp._manifest import manifest_digest, read_manifest
from trunkline.dcp._stored import checkpointer_file, list_torch_metadata

_COMMIT = re.compile(
    rb'"save_id":\s*"commit-([0-9]{10,19})-'
)  # quotes within strings are escaped: no other place
_MAX_COMMIT_BYTES = 100  # that such a match has, with the few spaces that JSON writers put there
DAMAGED = -1  # the number of a commit whose manifest cannot be read
_BLOCK_BYTES = 1 << 16
_TEMPORARY = re.compile(r"\.trunkline-[0-9a-f]{16}\.tmp")

_log = Log("checkpoint")


class Commit(NamedTuple):
    """A checkpoint of a run. `digest`: of its manifest, which no other save has."""

    step: int
    number: int
    digest: bytes


@dataclass(frozen=True)
class Collected:
    """What collect() removed, or would remove: paths and bytes; and why it could not remove others."""

    removed: list[tuple[str, int]]
    problems: list[Error]


def new_save_id(number: int) -> str:
    """Return the save_id of a commit."""
    return f"commit-{number:010d}-{uuid.uuid4()}"


def number_in(save_id: str) -> int:
    """Return the number of the commit in what new_save_id() returned."""
    return int(save_id.split("-")[1])


def steps_of(directory: Path) -> list[int]:
    """Return the steps that have a manifest, ascending; none if there is no such directory."""
    try:
        names = names_in(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = ((step_of(name), name) for name in names)
    return sorted(step for step, name in found if step is not None and (directory / name / MANIFEST).exists())


def ignored_in(directory: Path) -> dict[str, str]:
    """Return the folders that look like steps but do not count: their names, and what to do."""
    return ignored_steps(str(directory), lambda name: name == MANIFEST)


def commit_of(directory: Path, step: int, *, even_damaged: bool = False) -> Commit | None:
    """Return the checkpoint of a step; None if there is none (any more).

    Raises Corrupt or Format for a damaged manifest; `even_damaged`: its number is DAMAGED instead.
    """
    path = directory / step_name(step) / MANIFEST
    try:
        with system_errors(f"read {path}", path):
            found = _COMMIT.search(path.read_bytes())
        number = int(found[1]) if found else 0
        if found is None:
            try:
                _check_intact(path)
            except (Corrupt, Format):
                if not even_damaged:
                    raise
                number = DAMAGED
        return Commit(step, number, manifest_digest(path))
    except FileNotFoundError:
        return None


def digest_of(folder: Path) -> bytes:
    """Return what no other checkpoint in the place of this one has. Raises OSError if there is none."""
    return manifest_digest(folder / MANIFEST)


def check_readable(directory: Path, step: int) -> None:
    """Raise Corrupt, Format or Error for a step whose manifest cannot be read as a whole."""
    read_manifest(directory / step_name(step) / MANIFEST)


def _check_intact(manifest: Path) -> None:
    """Raise Corrupt or Format for a manifest that lacks a commit number because it is damaged.

    Nobody knows then whether it is that of the latest checkpoint. StorageWriter alone writes none.
    """
    try:
        read_manifest(manifest)
    except (Corrupt, Format) as error:
        error.strerror = (
            f"{error.strerror}. It may be the latest checkpoint of {manifest.parent.parent}: restore the "
            f"file, or move {manifest.parent.name} elsewhere to go on without it"
        )
        raise


def latest_of(directory: Path) -> int | None:
    """Return the step that was committed last; None if there is none.

    Reads manifests only up to their commit number, and none where there is only one. Raises Corrupt for a
    manifest that is damaged before that number.
    """
    steps = steps_of(directory)
    if len(steps) < 2:
        return steps[0] if steps else None
    numbers = {step: number for step in steps if (number := _commit_number(directory, step)) is not None}
    return max(numbers, key=lambda step: (numbers[step], step), default=None)


def _commit_number(directory: Path, step: int) -> int | None:
    """Return the number of the commit of a step, as commit_of() does. Raises Corrupt."""
    path = directory / step_name(step) / MANIFEST
    try:
        with system_errors(f"read {path}", path):
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
                return 0
            with path.open("rb") as file:
                read = b""
                while block := file.read(_BLOCK_BYTES):
                    read = read[-_MAX_COMMIT_BYTES:] + block
                    found = _COMMIT.search(read)
                    if found:
                        return int(found[1])
        _check_intact(path)
    except FileNotFoundError:
        return None
    return 0


def commits_of(directory: Path, *, even_damaged: bool = False) -> list[Commit]:
    """Return all checkpoints, in the order in which they were committed; raises as commit_of()."""
    found = (commit_of(directory, step, even_damaged=even_damaged) for step in steps_of(directory))
    return sorted((each for each in found if each is not None), key=lambda each: (each.number, each.step))


def step_directory(directory: "str | os.PathLike[str]", step: int | None) -> Path:
    """Return the folder of a step (None: the one that was committed last). Raises FileNotFoundError."""
    run = Path(directory).absolute()
    if step is None:
        step = latest_of(run)
        if step is None:
            raise exception_of("system", errno.ENOENT, f"{run} has no checkpoint yet", str(run))
    folder = run / step_name(step)
    if not (folder / MANIFEST).exists():
        steps = steps_of(run)
        has = f"it has steps {', '.join(map(str, steps))}" if steps else "it has none"
        raise exception_of(
            "system", errno.ENOENT, f"{run} has no checkpoint of step {step}; {has}", str(folder)
        )
    return folder


def check_usable(directory: Path) -> None:
    """Raise an error for a path that is neither a directory of such checkpoints nor can become one."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise exception_of("system", errno.ENOTDIR, f"{directory} is not a directory", str(directory))
    names = names_in(directory)
    held = checkpointer_file(directory)
    why, todo = None, "; name another directory"
    if is_node_directory(str(directory)):
        why, todo = "it is the directory of a node; pass local=True", ", or name another directory"
    elif held is not None:
        why = f"it belongs to a trunkline.Checkpointer (it contains {held})"
    elif manifest := next((name for name in names if name == MANIFEST or is_rank_manifest_name(name)), None):
        why = f"it holds a single checkpoint of trunkline.dcp ({manifest})"
        if steps_of(directory):
            why += " beside its steps, which StorageWriter has saved into it"
            todo = "; move that file and the rank*.shard files beside it elsewhere, or name another directory"
        elif step_of(directory.name) is not None:
            todo = f"; open the directory above it, {directory.parent}, or name another directory"
    elif list_torch_metadata(directory):
        why = "it holds a checkpoint of torch's FileSystemWriter"
    elif any(map(_is_foreign, names)) and not any(step_of(name) is not None for name in names):
        why = "it holds other files and no steps"
    if why is not None:
        message = f"{directory} cannot hold the steps of a run: {why}{todo}"
        raise exception_of("system", errno.ENOTEMPTY, message, str(directory))


def _is_foreign(name: str) -> bool:
    return not name.startswith(".") and name != "lost+found"


def check_no_link(directory: Path, step: int) -> None:
    """Raise FileExistsError if the folder of a step is a symbolic link: its files are of another run."""
    folder = directory / step_name(step)
    if folder.is_symlink():
        raise exception_of(
            "system",
            errno.EEXIST,
            f"cannot change step {step} of {directory}: {folder.name} is a symbolic link to "
            f"{folder.readlink()}; remove the link (what it leads to stays)",
            str(folder),
        )


def check_not_torchs(directory: Path, step: int) -> None:
    """Raise FileExistsError if the folder of a step holds a checkpoint of torch."""
    folder = directory / step_name(step)
    found = list_torch_metadata(folder) if folder.is_dir() else []
    if found:
        raise exception_of(
            "system",
            errno.EEXIST,
            f"cannot save step {step} of {directory}: {folder} contains a checkpoint of torch's "
            f"FileSystemWriter ({found[0]}), which would be lost; move it elsewhere, or remove {found[0]} "
            "and the *.distcp files",
            str(folder),
        )


def remove_step(directory: Path, step: int) -> None:
    """Remove a checkpoint durably. The caller holds the lock.

    Raises FileNotFoundError if there is none; Error if some of its files cannot be removed: then it is not a
    checkpoint any more, and collect() tries again.
    """
    folder = step_directory(directory, step)
    check_no_link(directory, step)
    try:
        for name in (*_directory.list_manifests(folder), MANIFEST):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise system_error(error, f"remove step {step} of {directory}", str(error.filename)) from None
    fsync_directory(folder)
    _log.info("%s: removing step %d", directory, step)
    problems = _remove_rest(folder)
    fsync_directory(directory)
    if problems:
        first = problems[0]
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        message = (
            f"step {step} of {directory} is not a checkpoint any more, but not all of it is removed: "
            f"{first.strerror}{more}; once that is possible, `trunkline checkpoint gc {directory}` removes it"
        )
        raise exception_of("system", first.errno or errno.EIO, message, str(first.filename or folder))


def _remove_rest(folder: Path) -> list[Error]:
    """Remove what is in a folder without manifests, and the folder; return why some of it stays."""
    problems: list[Error] = []

    def report(path: Path, error: OSError) -> None:
        target = error.filename or path
        made = system_error(error, f"remove {target}", str(target))
        assert isinstance(made, Error)
        problems.append(made)

    _directory.remove_leftovers(folder, sorted(_directory.list_leftovers(folder)), report=report)
    for name in names_in(folder):
        if _TEMPORARY.fullmatch(name):
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError as error:
                report(folder / name, error)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # those: files that are not ours
            report(folder, error)
    return problems


def is_uncommitted(folder: Path) -> bool:
    """Whether a folder of a step holds nothing but what a save left that has not committed."""
    names = names_in(folder)
    return not folder.is_symlink() and all(
        is_data_file_name(name) or is_refused_name(name) or _TEMPORARY.fullmatch(name) for name in names
    )


def collect(directory: Path, *, dry_run: bool = False) -> Collected:
    """Remove what interrupted saves and removals left: folders of steps without a manifest.

    The caller holds the lock.
    """
    collected = Collected([], [])
    for folder in (directory / name for name in sorted(names_in(directory))):
        if step_of(folder.name) is None or not folder.is_dir():
            continue
        try:
            if not is_uncommitted(folder):
                continue
            nbytes = sum(_size_of(folder / name) for name in names_in(folder))
            problems = [] if dry_run else _remove_rest(folder)
        except OSError as error:
            made = system_error(error, f"look for leftovers in {folder}", str(folder))
            problems = [made] if isinstance(made, Error) else []
        if problems:
            collected.problems.extend(problems)
        else:
            collected.removed.append((str(folder), nbytes))
    return collected


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep others from saving and removing. Raises Error (EBUSY) if another process goes on doing so."""
    with _directory.locked(directory):
        yield


def superseded(commits: Sequence[Commit], known: "set[Commit]", saved: Commit, keep: int) -> list[Commit]:
    """Return the checkpoints that go once `saved` is committed, in the order in which they go.

    Only those that the run has loaded or saved (`known`) count, and go: later steps first, since the run went
    back behind them, then the oldest.
    """
    ours = [each for each in commits if each in known or each == saved]
    ours.sort(key=lambda each: (each.step <= saved.step, each.number, each.step))
    doomed = ours[: max(0, len(ours) - keep)]
    return [each for each in doomed if each != saved]
