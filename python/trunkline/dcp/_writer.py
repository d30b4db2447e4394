"""Writing: trunkline.dcp.StorageWriter."""

import contextlib
import errno
import hashlib
import io
import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trunkline._arguments import bool_argument, items_argument
from trunkline._core import (
    Engine,
    FileLayout,
    Volume,
    check_replaceable,
    fsync_directory,
    is_on_local_filesystem,
)
from trunkline._errors import Corrupt, Error, Format, Unsupported, exception_of
from trunkline._formats.checkpoint_names import DESCRIPTOR, step_of
from trunkline._formats.dcp_names import (
    is_rank_manifest_name,
    is_torch_temporary_metadata,
    manifest_name,
    refused_name,
)
from trunkline._paths import absolute_path
from trunkline._tensor_io.memory import is_in_reach
from trunkline._tensor_io.tensors import bytes_of
from trunkline._tensor_io.transfer import write_layouts
from trunkline.dcp import _directory, _saves
from trunkline.dcp._coverage import find_partly_saved
from trunkline.dcp._endpoint import CheckpointPath, Endpoint, checkpoint_path_of
from trunkline.dcp._manifest import format_manifest, manifest_digest, names_in_manifest, read_manifest
from trunkline.dcp._nesting import OuterSaves, find_outer_saves
from trunkline.dcp._save_token import count_save, is_of_same_job, new_save_token, seconds_since_start
from trunkline.dcp._stored import (
    ALIGNMENT,
    CHUNK_BYTES,
    SMALL_ALIGNMENT,
    DataFile,
    StoredItem,
    checkpointer_file,
    directory_argument,
    find_torch_safetensors,
    list_torch_metadata,
    new_data_file_name,
)

# Copies of tensors that are not contiguous, or on devices out of reach, are held until their file is written:
# more of them than this make another file.
MOST_COPIED_BYTES = 1 << 30

_known_directories: set[str] = set()  # into which this process has saved, or of which it has warned


class _Save(threading.local):
    """What a writer knows of the save that this thread does.

    Torch does all of a save in one thread, beginning with reset(). With async_save that is a thread of its
    own, and the next save may begin before it ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next_path: CheckpointPath | None = None  # of reset(), for the save that follows
        self.path: CheckpointPath | None = None
        self.save_id = str(uuid.uuid4())
        self.has_token = False  # save_id is that of all ranks of a save without collectives
        self.rank = 0
        self.is_coordinator = False
        self.use_collectives = True
        self.has_made_directory = False
        self.number: int | None = None  # among the saves of this process, in the order in which they begin
        self.begun: _saves.Save | None = None  # with collectives, from where it may make files
        self.directories: _directory.OpenDirectories | None = None  # of it, and on volumes
        # Of other saves, when this one began; None where it did not look for manifests.
        self.leftovers: frozenset[str] = frozenset()
        self.manifests: set[tuple[str, bytes]] | None = None


class StorageWriter(Endpoint, TorchStorageWriter):
    """Writes checkpoints of torch.distributed.checkpoint into a directory, for save() and async_save().

    `path`: the directory, made where missing; checkpoint_id of a save takes its place, and is needed where
    `path` is None. All ranks must see it under this name.

    A checkpoint that it holds is replaced as a whole: until the new one is complete, it is
    the one that is loaded, whatever ends the saving early (an error of a rank, a crash); later its files are
    removed. `overwrite` None: with a warning, unless this process saved that checkpoint there. True: without
    one. False: a save into a directory that holds a checkpoint fails instead. Unless it is True, a save fails
    also where files of that checkpoint are missing in their volume (a disk that is not mounted), and where
    the directory holds one of torch's FileSystemWriter: its metadata is then removed once the new checkpoint
    is complete, while its data files (*.distcp) stay. Where it holds one of HuggingFaceStorageWriter every
    save fails.

    `volumes`: directories (or a Volume) over which each rank spreads its tensors by bytes, to use all of
    their disks; `path` then holds links to these files. `durable`: once saved, it also survives a power
    failure (fsync of files and directories).

    Every rank writes its share to files of its own, with a CRC-32C for each MiB. Nothing is pickled but what
    the planner hands over pickled: objects that are not tensors. Tensors may be on any device, of any strided
    dtype; others (sparse, quantized, subclasses) raise Unsupported, as does metadata of custom planners that
    JSON cannot hold. Errors of one rank reach all as CheckpointException.

    Several saves of async_save may use one writer at once, each with its own checkpoint_id. Where saves
    of one process into one directory overlap, the one that began last stays: one that began earlier and
    commits later is dropped, with a RuntimeWarning. Of two processes that save into one directory at once,
    one fails unless `overwrite` is True; what is loaded is one of the two. With `engine` None it can be sent
    to the process of AsyncCheckpointerType.PROCESS. With use_collectives=False a directory must hold no
    checkpoint yet, nor a part of one: without a common commit an old one could not be kept until all of the
    new is there.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str] | None" = None,
        *,
        volumes: "Sequence[str | os.PathLike[str]] | Volume | None" = None,
        durable: bool = True,
        overwrite: bool | None = None,
        engine: Engine | None = None,
    ) -> None:
        """Make a writer; touches nothing. Raises TypeError or ValueError for bad arguments."""
        super().__init__(path, engine)
        self._volumes = _volume_directories(volumes)
        self._durable = bool_argument(durable, "durable")
        self._overwrite = None if overwrite is None else bool_argument(overwrite, "overwrite")
        self._save = _Save()

    @property
    def checkpoint_id(self) -> str | None:
        """The directory, as it was given; None where none was yet."""
        # Without checkpoint_id= torch looks at this first, before the ranks communicate.
        self._refuse_nested(sys._getframe(), self._current_path(), is_method=False)
        return super().checkpoint_id

    def _current_path(self) -> CheckpointPath | None:
        return self._save.next_path or self._save.path or self._path

    def _refuse_nested(
        self, frame: FrameType, path: CheckpointPath | None, *, is_method: bool = True
    ) -> OuterSaves:
        """Return the saves that this thread is within. Raises Error if one of them does not allow this one.

        Within a method of a writer none may begin: this thread would wait for locks that it holds itself.
        Nor may one with the same writer, which knows one save for each thread, or into the same directory.
        Any other has nothing in common with the save that a signal handler has interrupted.
        """
        outer = find_outer_saves(frame, _METHODS, is_method=is_method)
        if outer.is_within_method or any(_is_shared(writer, self, path) for writer in outer.writers):
            where = "" if path is None else f" to {path.path}"
            raise Error(
                None,
                f"cannot save{where}: a save of trunkline.dcp is already running in this thread, and a "
                "signal handler called in the midst of it; set a flag in the handler, and save in the "
                'training loop once dcp.save() has returned ("Preemption" in docs/checkpoints.md shows how)',
                None if path is None else str(path.path),
            )
        return outer

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process, in which each save begins anew."""
        return {name: value for name, value in super().__getstate__().items() if name != "_save"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo __getstate__()."""
        self.__dict__.update(state)
        self._save = _Save()

    def storage_meta(self) -> StorageMeta | None:
        """Return what identifies this save in its metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save.save_id)

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin another save, into the directory `checkpoint_id` if it is given."""
        given = None if checkpoint_id is None else checkpoint_path_of(checkpoint_id, "checkpoint_id")
        self._refuse_nested(sys._getframe(), given or self._current_path())
        if given is not None:
            self._path = self._save.next_path = given
        self._save.save_id = str(uuid.uuid4())
        self._save.has_token = False
        self._save.number = _saves.next_number()
        self._save.leftovers, self._save.manifests = frozenset(), None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn which rank this is, and whether one of them commits for all."""
        self._refuse_nested(sys._getframe(), self._current_path())
        # From here on a reset() for a save in another thread changes nothing.
        self._save.path, self._save.next_path = self._save.next_path or self._path, None
        self._save.is_coordinator = is_coordinator
        self._save.rank = kwargs.get("rank") or 0
        self._save.use_collectives = kwargs.get("use_collectives", True)
        self._save.number = self._save.number or _saves.next_number()
        if not self._save.use_collectives:
            # Now: a planner that fails keeps this rank from prepare_local_plan().
            count_save(str(self._directory))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directories, and look at what is there; no rank has written yet."""
        outer = self._refuse_nested(sys._getframe(), self._current_path())
        self._refuse_checkpointer()
        if not self._save.use_collectives:
            token = new_save_token(str(self._directory))
            self._save.save_id, self._save.has_token = token or str(uuid.uuid4()), token is not None
        manifests = self._manifests_to_replace()
        self._note_refused(manifests)
        self._refuse_to_replace(manifests)
        self._refuse_unmounted(manifests)
        self._save.has_made_directory = _directory.make_directory(self._directory, durable=self._durable)
        try:
            for volume in self._volumes:
                _directory.make_directory(volume, durable=self._durable)
            self._save.directories = _directory.OpenDirectories([self._directory, *self._volumes])
            self._refuse_other_format()
            if self._save.is_coordinator or not self._save.use_collectives:
                self._refuse_linked_manifest()
                check_replaceable(self._manifest_path())  # else all would be written before it fails
            if self._save.use_collectives:
                number = self._save.number or _saves.next_number()
                found = _directory.list_leftovers(self._directory) if self._save.is_coordinator else []
                is_nested = bool(outer.writers)
                self._save.begun = _saves.begin(self._directory, number, found, is_nested=is_nested)
        except BaseException:
            self._undo([])
            raise
        self._warn_of_replacing(manifests)
        commits = self._save.is_coordinator and self._save.use_collectives  # without, none is replaced
        self._save.manifests = _identities_of(manifests) if commits else None
        self._save.leftovers = self._save.begun.removable if commits and self._save.begun else frozenset()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans: names of files need no agreement."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank; the future that is returned is done."""
        self._refuse_nested(sys._getframe(), self._current_path())
        results: list[WriteResult] = []
        try:
            self._remove_uncommitted()
            for group in _groups(plan.items, planner):
                self._check_directories()
                self._write_group(group, results)
            self._check_directories()
            if self._save.use_collectives and not self._save.is_coordinator:
                self._close_directories()  # nothing else tells this rank that the save is over
        except BaseException:
            self._undo(_names_of(results))
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: until the manifest has its name the old checkpoint is the one that is loaded, then this."""
        self._refuse_nested(sys._getframe(), self._current_path())
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        # A planner that caches its plans gives the same object to all saves, also to those under way at once.
        metadata = replace(
            metadata,
            version="1.0.0",  # of torch's Metadata, as its own writers say it
            storage_data=stored,
            storage_meta=self.storage_meta(),
        )
        names = _names_of(result for of_rank in results for result in of_rank)
        manifest = self._manifest_path()
        with contextlib.ExitStack() as until_committed:
            try:
                self._refuse_partly_saved(metadata)
                contents = format_manifest(metadata)
                until_committed.enter_context(_directory.locked(self._directory))
                until_committed.enter_context(_saves.committing(self._directory))
                if self._is_superseded():
                    self._undo(names)
                    return
                self._check_files(results)
                # Others may have saved since this save began.
                self._refuse_other_format()
                self._refuse_linked_manifest()
                replaced = self._manifests_to_replace() or self._manifests_before_start(names)
                self._refuse_to_replace(replaced)
                self._refuse_newer(replaced)
                leftovers = self._all_leftovers()
                torch_metadata = self._torch_metadata_to_remove()
                self._check_directories()
            except BaseException:
                self._undo(names)
                raise
            # Not undone where this fails: the manifest may have its name already, and the files that it names
            # must stay then. Otherwise they are leftovers, which the next save removes.
            layout = FileLayout(str(manifest), len(contents))
            layout.add(0, contents)
            write_layouts([layout], engine=self._engine, durable=self._durable)
            self._check_directories()  # else nothing may be removed: what is there now may be a copy
            _known_directories.add(str(self._directory))
            self._note_committed(contents)
            if self._save.begun is not None:
                self._save.begun.names.clear()
            kept = {item.file.name for item in stored.values() if item.file is not None}
            # Only now: a crash before this leaves both, which readers report, and not neither.
            _directory.remove_torch_metadata(self._directory, torch_metadata, durable=self._durable)
            _directory.remove_quietly(self._directory, sorted({*names} - kept))
            _directory.remove_leftovers(self._directory, sorted(leftovers - kept), self._check_directories)
        self._end()

    def _check_directories(self) -> None:
        """Raise OSError (ESTALE) where the paths lead elsewhere than when this save began."""
        if self._save.directories is not None:
            self._save.directories.check()

    def _close_directories(self) -> None:
        if self._save.directories is not None:
            self._save.directories.close()
            self._save.directories = None

    def _torch_metadata_to_remove(self) -> list[str]:
        """Return it only if it is to be replaced: torch may save here meanwhile."""
        return list_torch_metadata(self._directory) if self._overwrite else []

    def _remove_uncommitted(self) -> None:
        """Remove what saves of this process left here as another rank had an error: the disk may be full.

        Not before the ranks have agreed on a plan: then the rank that commits has ended these saves as well.
        Not on network filesystems, where this machine may not see yet what that rank has committed.
        """
        if self._save.begun is None or not is_on_local_filesystem(self._directory):
            return
        names = _saves.take_names_of_ended(self._directory)
        if not self._uncommitted(names):
            return
        with contextlib.suppress(OSError), _directory.locked(self._directory):
            _directory.remove_quietly(self._directory, self._uncommitted(names))

    def _uncommitted(self, names: set[str]) -> list[str]:
        """Return those of these files that are there, and that no manifest refers to."""
        rest = {name for name in names if os.path.lexists(self._directory / name)}
        if not rest:
            return []
        for name in os.listdir(self._directory):  # noqa: PTH208 - names, not paths
            if name == manifest_name(None) or is_rank_manifest_name(name):
                with contextlib.suppress(FileNotFoundError):  # another save has replaced it meanwhile
                    rest -= names_in_manifest(self._directory / name, rest)
        return sorted(rest)

    def _end(self) -> None:
        """Let go of what is of one save."""
        if self._save.begun is not None:
            self._save.begun.is_over = True
        self._close_directories()
        self._save.begun, self._save.number = None, None
        self._save.leftovers, self._save.manifests = frozenset(), None

    def _undo(self, names: list[str]) -> None:
        """Remove what a failed save has made: its files, and the directory unless it holds others."""
        _directory.remove_quietly(self._directory, names)
        if self._save.has_made_directory:
            with contextlib.suppress(OSError):  # other ranks have written
                self._directory.rmdir()
        self._end()

    def _manifest_path(self) -> Path:
        return self._directory / manifest_name(None if self._save.use_collectives else self._save.rank)

    def _refuse_linked_manifest(self) -> None:
        """Writing through a link would replace the manifest of the checkpoint that it leads to."""
        manifest = self._manifest_path()
        if manifest.is_symlink():
            raise Unsupported(
                None,
                f"cannot save to {self._directory}: its {manifest.name} is a symbolic link to "
                f"{manifest.readlink()}, whose checkpoint would be lost; remove the links in the directory, "
                "or save to a new one",
                str(manifest),
            )

    def _refuse_checkpointer(self) -> None:
        """Of two that save into one directory, neither would know of the other."""
        held = checkpointer_file(self._directory)
        if held is not None:
            raise exception_of(
                "system",
                errno.ENOTEMPTY,
                f"cannot save to {self._directory}: it belongs to a trunkline.Checkpointer (it holds "
                f"{held}); use a directory of its own, for example {self._directory}-dcp",
                str(self._directory),
            )
        run = self._directory.parent
        if step_of(self._directory.name) is not None and (run / DESCRIPTOR).exists():
            raise exception_of(
                "system",
                errno.ENOTEMPTY,
                f"cannot save to {self._directory}: this is the name of a step of the trunkline.Checkpointer "
                f"that {run} belongs to (it holds {DESCRIPTOR}); use a directory of its own, for example "
                f"{run}-dcp/{self._directory.name}",
                str(self._directory),
            )

    def _manifests_to_replace(self) -> list[Path]:
        """Return the manifests of the checkpoint that this save would replace; none where there is none.

        Without collectives those of other ranks may be of this very save, and are then left alone. All of
        these are of one save, because none is made where one of another is: so one tells.
        """
        manifests = [self._directory / name for name in _directory.list_manifests(self._directory)]
        if self._save.use_collectives:
            return manifests
        replaced = (manifest_name(None), manifest_name(self._save.rank))
        found = [manifest for manifest in manifests if manifest.name in replaced]
        if (
            self._save.has_token
            and not found
            and manifests
            and _save_id_of(manifests[0]) != self._save.save_id
        ):
            return manifests[:1]
        return found

    def _manifests_before_start(self, written: list[str]) -> list[Path]:
        """Return manifests of other ranks that are older than this process: those ranks are gone.

        A second line, behind the token. `written`: files of this save, which tell the filesystem's time.
        """
        if self._save.use_collectives or not self._save.has_token:
            return []
        now = max((os.lstat(self._directory / name).st_mtime for name in written), default=time.time())
        started = now - seconds_since_start()
        manifests = [self._directory / name for name in _directory.list_manifests(self._directory)]
        return [manifest for manifest in manifests if manifest.stat().st_mtime < started]

    def _note_refused(self, manifests: list[Path]) -> None:
        """Record that this rank came again to what it has saved: one that does not may have missed a save."""
        mine = self._directory / manifest_name(self._save.rank)
        if self._save.use_collectives or not self._save.has_token or mine not in manifests:
            return
        save_id = _save_id_of(mine)
        if save_id is not None and is_of_same_job(save_id, self._save.save_id):
            _directory.note_refused(self._directory, refused_name(self._save.rank), save_id)

    def _refuse_unmounted(self, manifests: list[Path]) -> None:
        """What cannot be seen now may be there again once its disk is mounted: only without its links not."""
        if self._overwrite or not self._save.is_coordinator or not manifests:
            return
        names = sorted(_directory.list_leftovers(self._directory))
        missing = {name: _directory.missing_target(self._directory / name) for name in names}
        if not any(missing.values()):
            return
        used = {name for manifest in manifests for name in _files_of(manifest, names)}
        for name, target in missing.items():
            if name in used and target is not None:  # others are left of a save that did not end
                raise Error(
                    None,
                    f"cannot save to {self._directory}: {name} of the checkpoint that it holds is in "
                    f"{target.parent}, and not there now; mount its disk, or pass overwrite=True to give "
                    "that checkpoint up",
                    str(target),
                )

    def _refuse_other_format(self) -> None:
        """Of two checkpoints in two formats nobody could tell later which one is newer."""
        todo = "remove that one first"
        writer, name = "HuggingFaceStorageWriter", find_torch_safetensors(self._directory)
        if name is None:  # its data is what makes it count, and may be used as a model: never replaced
            writer, name = "FileSystemWriter", next(iter(list_torch_metadata(self._directory)), None)
            if name is None or (self._overwrite and self._save.use_collectives):
                return
            if self._save.use_collectives:
                todo = "pass overwrite=True to replace it"
        what = "an unfinished save" if is_torch_temporary_metadata(name) else "a checkpoint"
        raise exception_of(
            "system",
            errno.EEXIST,
            f"cannot save to {self._directory}: it holds {what} of torch's {writer} ({name}); save "
            f"into another directory, or {todo}",
            str(self._directory / name),
        )

    def _refuse_to_replace(self, manifests: list[Path]) -> None:
        if not manifests or (self._save.use_collectives and self._overwrite is not False):
            return
        held = manifests[0]
        apart = not self._save.use_collectives
        why = "without collectives it cannot be replaced" if apart else "overwrite is False"
        message = f"Checkpoint already exists: {held}, and {why}; save into another directory"
        raise exception_of("system", errno.EEXIST, message, str(held))

    def _refuse_newer(self, manifests: list[Path]) -> None:
        """Replace only what was there when this save began: another may be a part of the same training."""
        if self._overwrite or self._save.manifests is None or not manifests:
            return
        last = _saves.last_committed(self._directory)
        known = self._save.manifests | ({(str(self._manifest_path()), last[1])} if last else set())
        newer = sorted(path for path, _ in _identities_of(manifests) - known)
        if newer:
            raise exception_of(
                "system",
                errno.EEXIST,
                f"Checkpoint already exists: {newer[0]}, which another save has made since this one began; "
                "of two saves at once each needs a directory of its own, or overwrite=True",
                newer[0],
            )

    def _is_superseded(self) -> bool:
        """Whether a save of this process that began later has committed; if so, say it.

        Then the directory holds what it would if they had committed in the order in which they began.
        """
        if not self._save.use_collectives or self._overwrite is False:  # where nothing is replaced
            return False
        last = _saves.last_committed(self._directory)
        if last is None or self._save.number is None or last[0] < self._save.number:
            return False
        if not _directory.list_manifests(self._directory):  # somebody has removed it
            return False
        warnings.warn(
            f"{self._directory}: a save that began later has committed first; the checkpoint of that one "
            "stays, and this one is dropped, as if it had been saved and then replaced. To keep both, save "
            "each into a directory of its own",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def _all_leftovers(self) -> set[str]:
        """Return what to remove after the commit, with what was saved since this save began."""
        names = {*self._save.leftovers}
        manifest = self._manifest_path()
        if self._save.manifests is not None and not _identities_of([manifest]) <= self._save.manifests:
            names |= _files_of(manifest, [])
        return names

    def _note_committed(self, contents: bytes) -> None:
        if self._save.use_collectives and self._save.number is not None:
            digest = hashlib.sha256(contents).digest()
            _saves.note_committed(self._directory, self._save.number, digest)

    def _refuse_partly_saved(self, metadata: Metadata) -> None:
        """With collectives this is all that is kept; torch does not check it where one rank saves."""
        found = find_partly_saved(metadata.state_dict_metadata) if self._save.use_collectives else None
        if found is not None:
            name, stored, wanted = found
            raise Error(
                None,
                f"cannot save to {self._directory}: this save holds {stored} of the {wanted} elements of "
                f"{name!r}; with no_dist=True each rank saves its part alone, and replaces the part of the "
                "one before. Save on all ranks without no_dist, or each its part with use_collectives=False",
                str(self._directory),
            )

    def _warn_of_replacing(self, manifests: list[Path]) -> None:
        """Warn of replacing a checkpoint that this process has not saved: it may be of another run."""
        directory = str(self._directory)
        if self._overwrite is not None or not self._save.is_coordinator or directory in _known_directories:
            return
        if manifests:
            _known_directories.add(directory)
            warnings.warn(
                f"{directory} already holds a checkpoint, which this save replaces when it is complete. To "
                "keep it, save each step into a directory of its own. overwrite=False makes the save fail, "
                "overwrite=True replaces without this warning",
                RuntimeWarning,
                stacklevel=3,
            )

    def _write_group(self, group: "list[_Bytes]", results: list[WriteResult]) -> None:
        shares = _spread(group, max(1, len(self._volumes)), self._save.rank)
        layouts = []
        offsets_of_shares = []
        names = []
        try:
            for volume, share in enumerate(shares):
                nbytes, offsets = _lay_out(share)
                offsets_of_shares.append(offsets)
                names.append(new_data_file_name(self._save.rank, volume, self._directory))
                if self._save.begun is not None:
                    self._save.begun.names.append(names[-1])
                path = self._directory / names[-1]
                if self._volumes and nbytes > 0:
                    path = _directory.place_in_volume(self._directory, self._volumes[volume], names[-1])
                layouts.append(_layout_of(str(path), nbytes, share, offsets))
            if self._durable and self._volumes:
                fsync_directory(self._directory)  # the links, before what they lead to
            written = [layout for layout in layouts if layout.nbytes > 0]
            sums = iter(write_layouts(written, engine=self._engine, durable=self._durable, replace=False))
        except BaseException:
            _directory.remove_quietly(self._directory, names)
            raise
        for name, layout, share, offsets in zip(names, layouts, shares, offsets_of_shares, strict=True):
            file = DataFile(name, layout.nbytes, _packed(next(sums))) if layout.nbytes > 0 else None
            for part, offset in zip(share, offsets, strict=True):
                place = file if part.nbytes > 0 else None
                stored = StoredItem(place, offset, part.nbytes, part.dtype, part.shape)
                results.append(WriteResult(part.item.index, part.nbytes, stored))

    def _check_files(self, results: list[list[WriteResult]]) -> None:
        for file in {result.storage_data.file for of_rank in results for result in of_rank} - {None}:
            path = self._directory / file.name
            try:
                found = path.stat().st_size
            except FileNotFoundError:
                found = -1
            if found != file.nbytes:
                what = "is gone" if found < 0 else "has another size"
                raise Error(
                    None,
                    f"{path}: this save wrote it, and it {what}; either another save into the directory "
                    "ended meanwhile, or not all ranks see the same directory",
                    str(path),
                )


# What torch calls for each save, in this order.
_METHODS = frozenset(
    method.__code__
    for method in (
        StorageWriter.reset,
        StorageWriter.set_up_storage_writer,
        StorageWriter.prepare_local_plan,
        StorageWriter.write_data,
        StorageWriter.finish,
    )
)


def _is_shared(outer: object, writer: StorageWriter, path: CheckpointPath | None) -> bool:
    """Whether a save with `writer` into `path` and one with `outer` would change the same things."""
    if outer is writer:
        return True
    other = outer._current_path() if isinstance(outer, StorageWriter) else None
    if path is None or other is None:
        return False
    return os.path.realpath(other.path) == os.path.realpath(path.path)


@dataclass(frozen=True)
class _Bytes:
    """An item, and memory that holds its bytes."""

    item: WriteItem
    memory: "torch.Tensor | memoryview"  # one dimension, uint8
    nbytes: int
    copied: bool  # memory that nobody but this holds
    dtype: str | None
    shape: tuple[int, ...] | None


def _groups(items: Iterable[WriteItem], planner: SavePlanner) -> Iterator[list[_Bytes]]:
    """Resolve items, as many at once as their copies may take memory."""
    group: list[_Bytes] = []
    copied = 0
    for item in items:
        part = _bytes_of(item, planner.resolve_data(item))
        copied += part.nbytes if part.copied else 0
        if copied > MOST_COPIED_BYTES and group:
            yield group
            group, copied = [], part.nbytes
        group.append(part)
    if group:
        yield group


def _bytes_of(item: WriteItem, data: "torch.Tensor | io.BytesIO") -> _Bytes:
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"{name}: the planner must give a BytesIO, not {type(data).__name__}")
        view = data.getbuffer()
        return _Bytes(item, view, view.nbytes, True, None, None)
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{name}: the planner must give a tensor, not {type(data).__name__}")
    tensor = data.detach()
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        shown = f"a {type(data).__name__} of layout {tensor.layout} and {tensor.dtype}"
        raise Unsupported(
            None, f"{name}: {shown} cannot be stored; give its parts as plain, strided tensors", None
        )
    if tensor.is_meta:
        raise Unsupported(None, f"{name}: a tensor on the meta device has no data to store", None)
    plain = (tensor if is_in_reach(tensor.device) else tensor.cpu()).resolve_conj().resolve_neg().contiguous()
    memory = bytes_of(plain)
    copied = plain.nbytes > 0 and plain.data_ptr() != tensor.data_ptr()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Bytes(item, memory, memory.numel(), copied, dtype, tuple(tensor.shape))


def _spread(group: list[_Bytes], count: int, first: int) -> list[list[_Bytes]]:
    """Share out by bytes: the largest first, each to the file that has the least; ties begin with `first`."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(group)), key=lambda number: -group[number].nbytes):
        least = min(range(count), key=lambda at: (loads[at], (at - first) % count))
        shares[least].append(number)
        loads[least] += group[number].nbytes
    return [[group[number] for number in sorted(share)] for share in shares]


def _lay_out(share: list[_Bytes]) -> tuple[int, list[int]]:
    """Size of the file, and the offset of each: first those that are aligned, then the small ones."""
    offsets = [0] * len(share)
    end = 0
    for alignment in (ALIGNMENT, SMALL_ALIGNMENT):
        for number, part in enumerate(share):
            if part.nbytes > 0 and (part.nbytes >= ALIGNMENT) == (alignment == ALIGNMENT):
                offsets[number] = -(-end // alignment) * alignment
                end = offsets[number] + part.nbytes
    return end, offsets


def _layout_of(path: str, nbytes: int, share: list[_Bytes], offsets: list[int]) -> FileLayout:
    layout = FileLayout(path, nbytes)
    for part, offset in zip(share, offsets, strict=True):
        if part.nbytes > 0:
            layout.add(offset, part.memory)
    for begin in range(0, nbytes, CHUNK_BYTES):
        layout.add_checksum("crc32c", begin, min(begin + CHUNK_BYTES, nbytes))
    return layout


def _packed(sums: list[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in sums)


def _files_of(manifest: Path, names: list[str]) -> set[str]:
    """Return the files that a manifest refers to: any of `names` if it is damaged, or of a newer version."""
    try:
        stored = read_manifest(manifest).storage_data
    except FileNotFoundError:  # another save has replaced it meanwhile
        return set()
    except (Corrupt, Format):
        return set(names)
    return {item.file.name for item in stored.values() if item.file is not None}


def _identities_of(manifests: list[Path]) -> set[tuple[str, bytes]]:
    """Return paths, and what differs from one save to the next."""
    found = set()
    for manifest in manifests:
        with contextlib.suppress(FileNotFoundError):  # another save has replaced it meanwhile
            found.add((str(manifest), manifest_digest(manifest)))
    return found


def _save_id_of(manifest: Path) -> str | None:
    """Return what identifies the save of a manifest; None if it is damaged, or of a newer version."""
    try:
        meta = read_manifest(manifest).storage_meta
    except (FileNotFoundError, Corrupt, Format):
        return None
    return None if meta is None else meta.save_id


def _names_of(results: Iterable[WriteResult]) -> list[str]:
    files = (result.storage_data.file for result in results)
    return sorted({file.name for file in files if file is not None})


def _volume_directories(volumes: "Sequence[str | os.PathLike[str]] | Volume | None") -> list[Path]:
    if volumes is None:
        return []
    if isinstance(volumes, Volume):
        volumes = volumes.directories
    wrong = f"volumes: must be a sequence of directories, not {type(volumes).__name__}"
    if isinstance(volumes, os.PathLike):
        raise TypeError(wrong)
    items = items_argument(volumes, wrong)
    made = [
        Path(absolute_path(directory_argument(volume, f"volumes[{i}]"), f"volumes[{i}]"))
        for i, volume in enumerate(items)
    ]
    if not made:
        raise ValueError("volumes: must name at least one directory; None keeps all files in `path`")
    return made
