"""Writing: trunkline.dcp.StorageWriter."""

import contextlib
import errno
import hashlib
import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trunkline._arguments import bool_argument, items_argument
from trunkline._core import (
    Engine,
    FileLayout,
    FileSet,
    Volume,
    check_replaceable,
    fsync_directory,
    is_on_local_filesystem,
)
from trunkline._errors import Corrupt, Error, Format, Unsupported, exception_of
from trunkline._formats.checkpoint_names import DESCRIPTOR, step_name, step_of
from trunkline._formats.dcp_names import (
    is_rank_manifest_name,
    is_torch_temporary_metadata,
    manifest_name,
    refused_name,
)
from trunkline._logging import Log
from trunkline._paths import absolute_path, names_in
from trunkline._tensor_io.transfer import write_layouts
from trunkline._trace import span
from trunkline.dcp import _directory, _saves
from trunkline.dcp._coverage import find_partly_saved
from trunkline.dcp._endpoint import CheckpointPath, Endpoint, checkpoint_path_of
from trunkline.dcp._manifest import format_manifest, manifest_digest, names_in_manifest, read_manifest
from trunkline.dcp._nesting import OuterSaves, find_outer_saves
from trunkline.dcp._save_token import count_save, is_of_same_job, new_save_token, seconds_since_start
from trunkline.dcp._shard_layout import ItemBytes, groups_of, lay_out, layout_of, packed, spread
from trunkline.dcp._shared_group import warn_of_shared_group
from trunkline.dcp._staging import find_staged_state, stage, working_directory
from trunkline.dcp._stored import (
    DataFile,
    StoredItem,
    checkpointer_file,
    data_file_prefix,
    directory_argument,
    find_torch_safetensors,
    list_torch_metadata,
    new_data_file_name,
)
from trunkline.dcp.run_directory import steps_of

_log = Log("checkpoint")

_known_directories: set[str] = set()  # this process has saved into them, or warned of them


class _SaveState(threading.local):
    """The state of a writer for the save that runs in this thread.

    Torch runs a save in one thread, beginning with reset(). With async_save that is a separate thread, and
    the next save may begin before it ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next_path: CheckpointPath | None = None  # of reset(), for the save that follows
        self.path: CheckpointPath | None = None
        self.save_id = str(uuid.uuid4())
        self.has_token = False  # save_id is shared by all ranks of a save without collectives
        self.rank = 0
        self.is_coordinator = False
        self.use_collectives = True
        self.has_made_directory = False
        self.number: int | None = None  # of the save, in the order in which saves of this process begin
        self.begun: _saves.CollectiveSave | None = None  # with collectives, once it may create files
        self.directories: _directory.OpenDirectories | None = None  # the checkpoint's, and volumes
        # Of other saves, when this one began; None if it did not list the manifests.
        self.leftovers: frozenset[str] = frozenset()
        self.manifests: set[tuple[str, bytes]] | None = None
        self.access_of: str | None = None  # a file of the checkpoint that is replaced: new ones get its mode


class StorageWriter(Endpoint, TorchStorageWriter, AsyncStager):
    """Writes checkpoints of torch.distributed.checkpoint into a directory, for save() and async_save().

    `path`: the directory, created if missing; checkpoint_id of a save replaces it, and is required if `path`
    is None. All ranks must see the directory under this name. A relative checkpoint_id of async_save() leads
    to where it was called, wherever the working directory is when torch hands it over in the background. If
    that is not known, it is rejected (ValueError): with an `async_stager` of another kind, if the working
    directory has changed since the writer was made.

    An existing checkpoint in the directory is replaced as a whole: it is loaded until the new one is
    complete, even if the save ends early (an error of a rank, a crash); its files are removed afterwards.
    `overwrite`: None warns, unless this process saved that checkpoint there. True does not warn. False makes
    a save into a directory that holds a checkpoint fail. Unless it is True, a save also fails if files of
    the existing checkpoint are missing in their volume (a disk that is not mounted), or if the directory
    holds a checkpoint of torch's FileSystemWriter; with True the metadata of that one is removed once the new
    checkpoint is complete, and its data files (*.distcp) stay. If the directory holds a checkpoint of
    HuggingFaceStorageWriter, every save fails.

    `volumes`: directories (or a Volume) over which each rank spreads its tensors by bytes, to use all of
    their disks; `path` then holds links to these files. `durable`: once saved, the checkpoint also survives a
    power failure (fsync of files and directories).

    Every rank writes its share to separate files, with a CRC-32C for each MiB. Nothing is pickled except
    objects that are not tensors, which the planner pickles. Tensors may be on any device, of any strided
    dtype; others (sparse, quantized, subclasses) raise Unsupported, as does metadata of custom planners that
    JSON cannot represent. Errors of one rank are raised on all as CheckpointException.

    Several saves of async_save may use one writer at once, each with its own checkpoint_id. If saves of one
    process into one directory overlap, the one that began last stays: one that began earlier and commits
    later is dropped, with a RuntimeWarning. If two processes save into one directory at once, one fails
    unless `overwrite` is True; the checkpoint is one of the two. With `engine` None the writer can be sent to
    the process of AsyncCheckpointerType.PROCESS. With use_collectives=False a directory must not hold a
    checkpoint yet, nor a part of one: without a common commit the old one could not be kept until the new one
    is complete.
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
        self._save = _SaveState()
        self._cwd = working_directory()
        # Where this writer may have been used when it was sent to this process.
        self._sender_cwds: frozenset[str | None] = frozenset()

    @property
    def checkpoint_id(self) -> str | None:
        """The directory, as it was given; None if none was given yet."""
        # Without checkpoint_id= torch reads this first, before the ranks communicate.
        self._reject_nested(sys._getframe(), self._current_path(), is_method=False)
        return super().checkpoint_id

    def _current_path(self) -> CheckpointPath | None:
        return self._save.next_path or self._save.path or self._path

    def _reject_nested(
        self, frame: FrameType, path: CheckpointPath | None, *, is_method: bool = True
    ) -> OuterSaves:
        """Return the saves that this thread is within. Raises Error if one of them does not allow this one.

        No save may begin within a method of a writer: this thread would wait for locks that it holds itself.
        Nor may one with the same writer, which supports one save per thread, or into the same directory. Any
        other save is independent of the one that a signal handler has interrupted.
        """
        outer = find_outer_saves(frame, _METHODS, is_method=is_method)
        if outer.is_within_method or any(_is_shared(writer, self, path) for writer in outer.writers):
            where = "" if path is None else f" to {path.path}"
            raise Error(
                None,
                f"cannot save{where}: a signal handler called this while a save of trunkline.dcp was running "
                "in the same thread; set a flag in the handler, and save in the training loop once "
                'dcp.save() has returned ("Preemption" in docs/checkpoints.md shows how)',
                None if path is None else str(path.path),
            )
        return outer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to send to another process, without that of a running save."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_save"}
        return {**state, "_sender_cwds": self._sender_cwds or self._possible_cwds()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo __getstate__()."""
        self.__dict__.update(state)
        self._save = _SaveState()
        self._cwd = working_directory()

    def storage_meta(self) -> StorageMeta | None:
        """Return the entry of the metadata that identifies this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save.save_id)

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin another save, into the directory `checkpoint_id` if it is given."""
        given = None if checkpoint_id is None else self._path_of(checkpoint_id)
        self._reject_nested(sys._getframe(), given or self._current_path())
        if given is not None:
            self._path = self._save.next_path = given
        self._save.save_id = str(uuid.uuid4())
        self._save.has_token = False
        self._save.number = _saves.next_number()
        self._save.leftovers, self._save.manifests = frozenset(), None

    def _path_of(self, checkpoint_id: "str | os.PathLike[str]") -> CheckpointPath:
        """Return the directory of a save.

        Torch hands checkpoint_id over in the thread or process of async_save(), some time after the call. The
        working directory may be another one by then: a relative path must not lead there.
        """
        path = checkpoint_path_of(checkpoint_id, "checkpoint_id")
        if Path(path.given).is_absolute():
            return path
        if self._sender_cwds and working_directory() == self._cwd:  # it has not been changed in this process
            possible = self._sender_cwds
        elif threading.current_thread() is threading.main_thread():
            return path
        else:
            possible = self._possible_cwds()
        directory, *others = sorted(map(str, possible))
        if not others:
            return CheckpointPath(path.given, Path(directory, path.given))
        raise ValueError(
            f"checkpoint_id: {path.given} is relative, and while the save runs in the background it is not "
            f"known which working directory it is relative to ({' or '.join([directory, *others])}); pass an "
            "absolute path"
        )

    def _possible_cwds(self) -> frozenset[str | None]:
        """Return where the call may have been made of the save that runs in this thread."""
        staged = find_staged_state()
        if staged is not None:
            return frozenset({staged.called_in})
        cwd = working_directory()
        if threading.current_thread() is threading.main_thread():
            return frozenset({cwd})
        return frozenset({cwd, self._cwd})  # another stager has made the copy, and says nothing of the call

    _synchronize_after_execute = False  # the copy is complete when stage() returns

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state in CPU memory, within the call of async_save()."""
        warn_of_shared_group(sys._getframe())
        return stage(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is complete when stage() returns."""

    def close(self) -> None:
        """Do nothing: stage() leaves nothing to be released."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store which rank this is, and whether one rank commits for all."""
        self._reject_nested(sys._getframe(), self._current_path())
        # From here on a reset() for a save in another thread has no effect on this one.
        self._save.path, self._save.next_path = self._save.next_path or self._path, None
        self._save.is_coordinator = is_coordinator
        self._save.rank = kwargs.get("rank") or 0
        self._save.use_collectives = kwargs.get("use_collectives", True)
        self._save.number = self._save.number or _saves.next_number()
        if not self._save.use_collectives:
            # Here, since a planner that fails prevents prepare_local_plan() on this rank.
            count_save(str(self._directory))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directories, and check what they contain; no rank has written yet."""
        outer = self._reject_nested(sys._getframe(), self._current_path())
        with self._step("prepare_local_plan"):
            self._reject_checkpointer()
            if not self._save.use_collectives:
                token = new_save_token(str(self._directory))
                self._save.save_id, self._save.has_token = token or str(uuid.uuid4()), token is not None
            manifests = self._manifests_to_replace()
            self._record_rejected(manifests)
            self._reject_replacing(manifests)
            self._reject_unmounted(manifests)
            self._save.has_made_directory = _directory.make_directory(self._directory, durable=self._durable)
            try:
                for volume in self._volumes:
                    _directory.make_directory(volume, durable=self._durable)
                self._save.directories = _directory.OpenDirectories([self._directory, *self._volumes])
                self._reject_other_format()
                if self._save.is_coordinator or not self._save.use_collectives:
                    self._reject_linked_manifest()
                    # Now, since otherwise it fails after all is written.
                    check_replaceable(self._manifest_path())
                if self._save.use_collectives:
                    number = self._save.number or _saves.next_number()
                    found = _directory.list_leftovers(self._directory) if self._save.is_coordinator else []
                    is_nested = bool(outer.writers)
                    self._save.begun = _saves.begin(self._directory, number, found, is_nested=is_nested)
            except BaseException:
                self._undo([])
                raise
            self._warn_of_replacing(manifests)
            self._save.access_of = self._most_private_file(manifests)
            commits = self._save.is_coordinator and self._save.use_collectives  # without, none is replaced
            self._save.manifests = _identities_of(manifests) if commits else None
            self._save.leftovers = self._save.begun.removable if commits and self._save.begun else frozenset()
        _log.info(
            "%s: rank %d saves %d items%s", self._directory, self._save.rank, len(plan.items), self._how()
        )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged: ranks need not agree on file names."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank; the returned future is done."""
        self._reject_nested(sys._getframe(), self._current_path())
        results: list[WriteResult] = []
        began = time.monotonic()
        with self._step("write_data"):
            try:
                self._remove_uncommitted()
                for group in groups_of(plan.items, planner):
                    self._check_cancelled()
                    self._check_directories()
                    self._write_group(group, results)
                self._check_directories()
                if self._save.use_collectives and not self._save.is_coordinator:
                    self._close_directories()  # torch makes no later call on this rank
            except BaseException:
                self._undo(_names_of(results))
                raise
        _log.info(
            "%s: rank %d wrote %d bytes in %d files in %.1f s",
            self._directory,
            self._save.rank,
            sum(result.size_in_bytes for result in results),
            len(_names_of(results)),
            time.monotonic() - began,
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: as soon as the manifest has its name, this checkpoint is loaded instead of the old one."""
        self._reject_nested(sys._getframe(), self._current_path())
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        # A planner that caches its plans passes the same object to all saves, also to concurrent ones.
        metadata = replace(
            metadata,
            version="1.0.0",  # of torch's Metadata, as torch's writers set it
            storage_data=stored,
            storage_meta=self.storage_meta(),
        )
        names = _names_of(result for of_rank in results for result in of_rank)
        manifest = self._manifest_path()
        with self._step("finish"), contextlib.ExitStack() as until_committed:
            try:
                self._check_cancelled()
                self._reject_partly_saved(metadata)
                contents = format_manifest(metadata)
                until_committed.enter_context(_directory.locked(self._directory))
                until_committed.enter_context(_saves.committing(self._directory))
                if self._is_superseded():
                    self._undo(names)
                    return
                self._check_files(results)
                # Others may have saved since this save began.
                self._reject_other_format()
                self._reject_linked_manifest()
                replaced = self._manifests_to_replace() or self._manifests_before_start(names)
                self._reject_replacing(replaced)
                self._reject_newer(replaced)
                leftovers = self._all_leftovers()
                torch_metadata = self._torch_metadata_to_remove()
                self._check_directories()
            except BaseException:
                self._undo(names)
                raise
            # Not undone if this fails: the manifest may have its name already, and then the files that it
            # names must stay. If not, they are leftovers, which the next save removes.
            layout = FileLayout(str(manifest), len(contents))
            layout.add(0, contents)
            write_layouts(
                [layout], engine=self._engine, durable=self._durable, access_of=self._save.access_of
            )
            self._check_directories()  # if replaced, nothing may be removed: the directory may be a copy
            _known_directories.add(str(self._directory))
            self._note_committed(contents)
            if self._save.begun is not None:
                self._save.begun.names.clear()
            kept = {item.file.name for item in stored.values() if item.file is not None}
            # Only now: a crash before this leaves both checkpoints, which readers report, instead of none.
            _directory.remove_torch_metadata(self._directory, torch_metadata, durable=self._durable)
            _directory.remove_quietly(self._directory, sorted({*names} - kept))
            _directory.remove_leftovers(self._directory, sorted(leftovers - kept), self._check_directories)
        _log.info("%s: saved: %d items in %d files", self._directory, len(stored), len(kept))
        self._end()

    @contextlib.contextmanager
    def _step(self, method: str) -> Iterator[None]:
        """Show what torch calls for a save in traces, and its failure in the log."""
        with span("checkpoint", f"StorageWriter.{method}", str(self._directory)):
            try:
                yield
            except BaseException as error:
                _log.info("%s: not saved: %s", self._directory, error)
                raise

    def _how(self) -> str:
        if not self._save.use_collectives:
            return " without collectives: its manifest is its own"
        return ", and commits for all ranks" if self._save.is_coordinator else ""

    def _check_directories(self) -> None:
        """Raise OSError (ESTALE) if the paths lead to other directories than when this save began."""
        if self._save.directories is not None:
            self._save.directories.check()

    def _close_directories(self) -> None:
        if self._save.directories is not None:
            self._save.directories.close()
            self._save.directories = None

    def _check_cancelled(self) -> None:
        """Raise Cancelled if another thread ends the save, which has not committed."""

    def _watch(self, files: FileSet | None) -> None:
        """Note which files are being written (None: none any more), for who cancels the save."""

    def _replaces_torch(self) -> bool:
        """Whether a checkpoint of torch's FileSystemWriter is replaced."""
        return bool(self._overwrite)

    def _torch_metadata_to_remove(self) -> list[str]:
        """Return it only with overwrite=True: torch may be saving here."""
        return list_torch_metadata(self._directory) if self._replaces_torch() else []

    def _remove_uncommitted(self) -> None:
        """Remove files of saves of this process that an error on another rank ended: the disk may be full.

        Only once the ranks have agreed on a plan: then the rank that commits has ended these saves as well.
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
        """Return the files among `names` that exist, and to which no manifest refers."""
        rest = {name for name in names if os.path.lexists(self._directory / name)}
        if not rest:
            return []
        for name in names_in(self._directory):
            if name == manifest_name(None) or is_rank_manifest_name(name):
                with contextlib.suppress(FileNotFoundError):  # another save has replaced it meanwhile
                    rest -= names_in_manifest(self._directory / name, rest)
        return sorted(rest)

    def _end(self) -> None:
        """Release the state of the save."""
        if self._save.begun is not None:
            self._save.begun.is_over = True
        self._close_directories()
        self._save.begun, self._save.number = None, None
        self._save.leftovers, self._save.manifests = frozenset(), None

    def _undo(self, names: list[str]) -> None:
        """Remove what a failed save created: its files, and the directory unless others may write to it."""
        _directory.remove_quietly(self._directory, names)
        # Another rank that saves its part alone may have found the directory, and not have written yet.
        if self._save.has_made_directory and not _has_other_ranks():
            with contextlib.suppress(OSError):  # another process has written
                self._directory.rmdir()
        self._end()

    def _manifest_path(self) -> Path:
        return self._directory / manifest_name(None if self._save.use_collectives else self._save.rank)

    def _reject_linked_manifest(self) -> None:
        """Raise Unsupported for a linked manifest: writing would replace that of another checkpoint."""
        manifest = self._manifest_path()
        if manifest.is_symlink():
            raise Unsupported(
                None,
                f"cannot save to {self._directory}: its {manifest.name} is a symbolic link to "
                f"{manifest.readlink()}, whose checkpoint would be lost; remove the links in the directory, "
                "or save to a new one",
                str(manifest),
            )

    def _reject_checkpointer(self) -> None:
        """Raise Error for a directory of a Checkpointer, which would not know of this save."""
        held = checkpointer_file(self._directory)
        if held is not None:
            raise exception_of(
                "system",
                errno.ENOTEMPTY,
                f"cannot save to {self._directory}: it belongs to a trunkline.Checkpointer (it contains "
                f"{held}); use a separate directory, for example {self._directory}-dcp",
                str(self._directory),
            )
        steps = steps_of(self._directory)
        if steps:
            raise exception_of(
                "system",
                errno.ENOTEMPTY,
                f"cannot save to {self._directory}: it holds the steps of a run of "
                f"trunkline.dcp.Checkpointer ({step_name(steps[0])}); use a separate directory, for example "
                f"{self._directory}-single",
                str(self._directory),
            )
        run = self._directory.parent
        if step_of(self._directory.name) is not None and (run / DESCRIPTOR).exists():
            raise exception_of(
                "system",
                errno.ENOTEMPTY,
                f"cannot save to {self._directory}: this is the name of a step of the trunkline.Checkpointer "
                f"that {run} belongs to (it contains {DESCRIPTOR}); use a separate directory, for example "
                f"{run}-dcp/{self._directory.name}",
                str(self._directory),
            )

    def _manifests_to_replace(self) -> list[Path]:
        """Return the manifests of the checkpoint that this save would replace, if there is one.

        Without collectives, manifests of other ranks may belong to this save, and are then ignored. All of
        them belong to one save, because none is written beside one of another save: so checking one suffices.
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
        """Return manifests of other ranks that are older than this process: those ranks have ended.

        A second check besides the token. `written`: files of this save, which show the filesystem's time.
        """
        if self._save.use_collectives or not self._save.has_token:
            return []
        now = max((os.lstat(self._directory / name).st_mtime for name in written), default=time.time())
        started = now - seconds_since_start()
        manifests = [self._directory / name for name in _directory.list_manifests(self._directory)]
        return [manifest for manifest in manifests if manifest.stat().st_mtime < started]

    def _most_private_file(self, manifests: list[Path]) -> str | None:
        """Return the file that the fewest may use, of the checkpoint that is replaced; None: there is none.

        Each rank looks at its own files, if it has any there, rather than at those of all ranks.
        """
        found = list(manifests)
        names: list[str] = []
        with contextlib.suppress(
            FileNotFoundError
        ):  # a save of another process failed, and removed its folder
            found += [self._directory / name for name in list_torch_metadata(self._directory)]
            names = _directory.list_leftovers(self._directory)
        if found:
            own = [name for name in names if name.startswith(data_file_prefix(self._save.rank))]
            found += [self._directory / name for name in own or names]
        rights: dict[Path, int] = {}
        for path in found:
            with contextlib.suppress(OSError):  # another save removes it, or its volume is not mounted
                rights[path] = (path.stat().st_mode & 0o777).bit_count()
        return str(min(rights, key=rights.__getitem__)) if rights else None

    def _record_rejected(self, manifests: list[Path]) -> None:
        """Record that this rank tried to save again: another rank may have missed a save."""
        mine = self._directory / manifest_name(self._save.rank)
        if self._save.use_collectives or not self._save.has_token or mine not in manifests:
            return
        save_id = _save_id_of(mine)
        if save_id is not None and is_of_same_job(save_id, self._save.save_id):
            _directory.record_rejected(self._directory, refused_name(self._save.rank), save_id)

    def _reject_unmounted(self, manifests: list[Path]) -> None:
        """Raise Error if files of the existing checkpoint are missing: their disk may not be mounted."""
        if self._overwrite or not self._save.is_coordinator or not manifests:
            return
        names = sorted(_directory.list_leftovers(self._directory))
        missing = {name: _directory.missing_target(self._directory / name) for name in names}
        if not any(missing.values()):
            return
        used = {name for manifest in manifests for name in _files_of(manifest, names)}
        for name, target in missing.items():
            if name in used and target is not None:  # others are leftovers of a save that did not finish
                raise Error(
                    None,
                    f"cannot save to {self._directory}: {name} of the existing checkpoint is missing in "
                    f"{target.parent}; mount its disk, or pass overwrite=True to replace that checkpoint",
                    str(target),
                )

    def _reject_other_format(self) -> None:
        """Raise Error for a checkpoint in another format: later it would be unknown which one is newer."""
        todo = "remove that one first"
        writer, name = "HuggingFaceStorageWriter", find_torch_safetensors(self._directory)
        if name is None:  # safetensors files are never replaced: they may be in use as a model
            writer, name = "FileSystemWriter", next(iter(list_torch_metadata(self._directory)), None)
            if name is None or (self._replaces_torch() and self._save.use_collectives):
                return
            if self._save.use_collectives and not self._overwrite:
                todo = "pass overwrite=True to replace it"
        what = "an unfinished save" if is_torch_temporary_metadata(name) else "a checkpoint"
        raise exception_of(
            "system",
            errno.EEXIST,
            f"cannot save to {self._directory}: it contains {what} of torch's {writer} ({name}); save "
            f"into another directory, or {todo}",
            str(self._directory / name),
        )

    def _reject_replacing(self, manifests: list[Path]) -> None:
        if not manifests or (self._save.use_collectives and self._overwrite is not False):
            return
        held = manifests[0]
        apart = not self._save.use_collectives
        why = "without collectives it cannot be replaced" if apart else "overwrite is False"
        message = f"Checkpoint already exists: {held}, and {why}; save into another directory"
        raise exception_of("system", errno.EEXIST, message, str(held))

    def _reject_newer(self, manifests: list[Path]) -> None:
        """Raise Error for a checkpoint newer than this save: it may be part of the same training."""
        if self._overwrite or self._save.manifests is None or not manifests:
            return
        last = _saves.last_committed(self._directory)
        known = self._save.manifests | ({(str(self._manifest_path()), last[1])} if last else set())
        newer = sorted(path for path, _ in _identities_of(manifests) - known)
        if newer:
            raise exception_of(
                "system",
                errno.EEXIST,
                f"Checkpoint already exists: {newer[0]}, which another save has written since this one "
                "began; use a separate directory for each of two concurrent saves, or pass overwrite=True",
                newer[0],
            )

    def _is_superseded(self) -> bool:
        """Whether a save of this process that began later has committed; if so, warn.

        Then the directory is as if they had committed in the order in which they began.
        """
        if not self._save.use_collectives or self._overwrite is False:  # nothing is replaced
            return False
        last = _saves.last_committed(self._directory)
        if last is None or self._save.number is None or last[0] < self._save.number:
            return False
        if not _directory.list_manifests(self._directory):  # it has been removed
            return False
        warnings.warn(
            f"{self._directory}: a save that began later has committed first; its checkpoint stays, and this "
            "one is dropped, as if it had been saved and then replaced. To keep both, save each into a "
            "separate directory",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def _all_leftovers(self) -> set[str]:
        """Return the files to remove after the commit, including those saved since this save began."""
        names = {*self._save.leftovers}
        manifest = self._manifest_path()
        if self._save.manifests is not None and not _identities_of([manifest]) <= self._save.manifests:
            names |= _files_of(manifest, [])
        return names

    def _note_committed(self, contents: bytes) -> None:
        if self._save.use_collectives and self._save.number is not None:
            digest = hashlib.sha256(contents).digest()
            _saves.note_committed(self._directory, self._save.number, digest)

    def _reject_partly_saved(self, metadata: Metadata) -> None:
        """Raise Error for incomplete tensors, if collectives are used; torch does not check that."""
        found = find_partly_saved(metadata.state_dict_metadata) if self._save.use_collectives else None
        if found is not None:
            name, stored, wanted = found
            raise Error(
                None,
                f"cannot save to {self._directory}: this save contains {stored} of the {wanted} elements of "
                f"{name!r}; with no_dist=True each rank saves its part alone, and replaces that of the rank "
                "before. Save on all ranks without no_dist, or save each part with use_collectives=False",
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
                "keep it, save each step into a separate directory. overwrite=False makes the save fail, "
                "overwrite=True replaces without this warning",
                RuntimeWarning,
                stacklevel=3,
            )

    def _write_group(self, group: "list[ItemBytes]", results: list[WriteResult]) -> None:
        shares = spread(group, max(1, len(self._volumes)), self._save.rank)
        layouts = []
        offsets_of_shares = []
        names = []
        try:
            for volume, share in enumerate(shares):
                nbytes, offsets = lay_out(share)
                offsets_of_shares.append(offsets)
                names.append(new_data_file_name(self._save.rank, volume, self._directory))
                if self._save.begun is not None:
                    self._save.begun.names.append(names[-1])
                path = self._directory / names[-1]
                if self._volumes and nbytes > 0:
                    path = _directory.place_in_volume(self._directory, self._volumes[volume], names[-1])
                layouts.append(layout_of(str(path), nbytes, share, offsets))
            if self._durable and self._volumes:
                fsync_directory(self._directory)  # the links, before what they lead to
            written = [layout for layout in layouts if layout.nbytes > 0]
            sums = iter(
                write_layouts(
                    written,
                    engine=self._engine,
                    durable=self._durable,
                    replace=False,
                    access_of=self._save.access_of,
                    watch=self._watch,
                )
            )
        except BaseException:
            _directory.remove_quietly(self._directory, names)
            raise
        for name, layout, share, offsets in zip(names, layouts, shares, offsets_of_shares, strict=True):
            file = DataFile(name, layout.nbytes, packed(next(sums))) if layout.nbytes > 0 else None
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
                what = "is missing" if found < 0 else "has a different size"
                raise Error(
                    None,
                    f"cannot save: {path}, which this save wrote, {what}; either another save into the "
                    "directory ended meanwhile, or not all ranks see the same directory",
                    str(path),
                )


# The methods that torch calls for each save, in this order.
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


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_shared(outer: object, writer: StorageWriter, path: CheckpointPath | None) -> bool:
    """Whether a save with `writer` into `path` would interfere with one by `outer`."""
    if outer is writer:
        return True
    other = outer._current_path() if isinstance(outer, StorageWriter) else None
    if path is None or other is None:
        return False
    return os.path.realpath(other.path) == os.path.realpath(path.path)


def _files_of(manifest: Path, names: list[str]) -> set[str]:
    """Return the files that a manifest refers to: all `names` if it is damaged, or of a newer version."""
    try:
        stored = read_manifest(manifest).storage_data
    except FileNotFoundError:  # another save has replaced it meanwhile
        return set()
    except (Corrupt, Format):
        return set(names)
    return {item.file.name for item in stored.values() if item.file is not None}


def _identities_of(manifests: list[Path]) -> set[tuple[str, bytes]]:
    """Return paths, with digests that differ from one save to the next."""
    found = set()
    for manifest in manifests:
        with contextlib.suppress(FileNotFoundError):  # another save has replaced it meanwhile
            found.add((str(manifest), manifest_digest(manifest)))
    return found


def _save_id_of(manifest: Path) -> str | None:
    """Return the save_id of a manifest; None if it is damaged, or of a newer version."""
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
