"""Reading: trunkline.dcp.StorageReader."""

import builtins
import errno
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from trunkline._arguments import bool_argument
from trunkline._core import Engine, FileLayout
from trunkline._errors import Corrupt, Error, Format, exception_of
from trunkline._formats.dcp_names import (
    is_torch_metadata,
    is_torch_temporary_metadata,
    manifest_name,
    refused_name,
)
from trunkline._formats.node_names import RECORD
from trunkline._logging import Log
from trunkline._tensor_io.partly_filled import partly_filled
from trunkline._tensor_io.transfer import read_layouts
from trunkline._trace import span
from trunkline.dcp._copied_step import read_copied_step
from trunkline.dcp._coverage import find_partly_loaded
from trunkline.dcp._directory import count_rejected, missing_target
from trunkline.dcp._endpoint import Endpoint, checkpoint_path_of
from trunkline.dcp._manifest import read_manifest
from trunkline.dcp._request import Request, groups, make_request, settle_targets
from trunkline.dcp._save_token import is_save_token
from trunkline.dcp._stored import (
    CHUNK_BYTES,
    DataFile,
    StoredItem,
    checkpointer_file,
    find_torch_safetensors,
    list_torch_metadata,
)

_log = Log("checkpoint")

_OF_A_RANK = "rank "  # prefix of the identity of one rank's manifest, of a save without collectives


class StorageReader(Endpoint, TorchStorageReader):
    """Reads checkpoints that StorageWriter wrote, for torch.distributed.checkpoint.load().

    `path`: the directory, or that of a step which nodes have copied to a tier (Checkpointer with local=True);
    checkpoint_id of a load replaces it, and is required if `path` is None. Each rank
    reads the bytes that it needs, for any number of ranks that saved: directly into its tensors if they are
    contiguous, on the CPU or a CUDA GPU, and of the stored dtype. `verify`: every MiB that holds some of
    these bytes is read completely and compared with its CRC-32C; False reads only the bytes themselves,
    unverified.

    Raises, on all ranks as CheckpointException: Corrupt, which names file, tensor and chunk (counted in the
    file, from 0), if a file is missing, truncated, or not what was written; Format if the directory holds
    another format, or a checkpoint of torch's own writers beside this one. After an error tensors may hold
    anything. The reader unpickles nothing; torch's planners unpickle objects that are not tensors, so load
    such checkpoints only from sources that you trust.

    A reader must not be used for two loads at once.
    """

    _instead = "load the remaining data with verify=False"  # of a damaged file that cannot be restored

    def __init__(
        self,
        path: "str | os.PathLike[str] | None" = None,
        *,
        verify: bool = True,
        engine: Engine | None = None,
    ) -> None:
        """Make a reader; touches nothing. Raises TypeError or ValueError for bad arguments."""
        super().__init__(path, engine)
        self._verify = bool_argument(verify, "verify")
        self._load_id = str(uuid.uuid4())
        self._stored: dict[MetadataIndex, StoredItem] = {}
        self._tensors: dict[str, Any] = {}  # and objects, as torch describes them
        self._save_id: str | None = None
        self._of_one_rank = False
        self._rank = 0

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin another load, from the directory `checkpoint_id` if it is given."""
        if checkpoint_id is not None:
            self._path = checkpoint_path_of(checkpoint_id, "checkpoint_id")
        self._load_id = str(uuid.uuid4())
        self._stored = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the manifest; with `rank`, if there is no common one, that of this rank.

        Raises FileNotFoundError if there is none, Corrupt, Format.
        """
        with self._step("read_metadata"):
            return self._read_metadata(kwargs.get("rank"))

    def _read_metadata(self, rank: int | None) -> Metadata:
        path = self._directory / manifest_name(None)
        copied = read_copied_step(self._directory)
        if copied is not None:
            _log.info("%s: rank %d loads the copy of a step of nodes", self._directory, rank or 0)
            return copied
        if rank is not None and not path.exists():  # a damaged common manifest is not skipped
            path = self._directory / manifest_name(rank)
            _log.debug("%s: there is no common manifest; rank %d reads its own", self._directory, rank)
        self._of_one_rank = path.name != manifest_name(None)
        self._rank = rank or 0
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            code = error.errno or errno.ENOENT
            raise exception_of("system", code, self._why_none(path), str(path)) from None
        self._reject_two_formats(path)
        metadata = read_manifest(path)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        _log.info("%s: rank %d loads the checkpoint of %s", self._directory, self._rank, path.name)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Remember from the manifest where items are stored."""
        if not isinstance(metadata.storage_data, dict):
            raise TypeError("metadata: must be what read_metadata returned")
        self._stored = metadata.storage_data
        self._tensors = metadata.state_dict_metadata
        self._save_id = None if metadata.storage_meta is None else metadata.storage_meta.save_id

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with an identity of the checkpoint that this rank found.

        Ranks that saved without collectives have a manifest each, which identifies its save. Manifests of
        earlier versions do not, so they cannot be compared. The identity includes how often the rank tried to
        save into the directory again: if that differs between ranks, one of them may have missed a save.
        """
        if not self._of_one_rank:
            plan.storage_data = self._identity()
        elif self._save_id is None or not is_save_token(self._save_id):
            plan.storage_data = _OF_A_RANK
        else:
            refused = count_rejected(self._directory, refused_name(self._rank), self._save_id)
            plan.storage_data = f"{_OF_A_RANK}{self._save_id} {refused}"
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. Raises Error if ranks found different checkpoints."""
        for rank, plan in enumerate(plans):
            if plan.storage_data == plans[0].storage_data:
                continue
            found_by = [str(each.storage_data) for each in (plans[0], plan)]
            of_saves = [each.rpartition(" ")[0] for each in found_by]
            if not all(each.startswith(_OF_A_RANK) for each in found_by):
                found = f"rank {rank} finds a different checkpoint than rank 0"
                why = (
                    "another job saved into the directory meanwhile, or it is a different directory on that "
                    "rank's machine"
                )
                todo = "Let no other job save, and load again"
            elif of_saves[0] == of_saves[1]:
                found = f"ranks 0 and {rank} have not saved into the directory equally often"
                why = "one may have missed a save, so the manifests may be of two moments of the training"
                todo = "Load another checkpoint; or remove dcp-rank*.refused if no rank missed a save"
            else:
                found = f"{manifest_name(rank)} is of a different save than {manifest_name(0)}"
                why = "a save without collectives ended early, and another one followed"
                todo = "Load another checkpoint, or load on as many ranks as the last save had"
            raise Error(None, f"{self._directory}: {found}; {why}. {todo}", str(self._directory))
        return plans

    def _identity(self) -> str:
        """Return a digest that identifies the checkpoint: names of files are never reused."""
        names = {item.file.name for item in self._stored.values() if item.file is not None}
        return hashlib.sha256("\n".join([self._save_id or "", *sorted(names)]).encode()).hexdigest()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank into the planner's tensors; the future that is returned is done.

        Raises Format if it would leave elements of a tensor unchanged because they are not stored.
        """
        began, nbytes, buffered = time.monotonic(), 0, 0
        with self._step("read_data"):
            self._reject_partly_loaded(plan, planner)
            requests = (
                make_request(item, self._stored, planner, str(self.checkpoint_id)) for item in plan.items
            )
            parts = groups(requests)
            first = list(islice(parts, 1))  # an error before this has changed no tensor
            with partly_filled("the state that is loaded into", ""):
                for group in chain(first, parts):
                    self._read_group(group)
                    for request in group:
                        nbytes += request.nbytes
                        buffered += 0 if request.direct else request.nbytes
                        request.hand_over(planner)
        _log.info(
            "%s: rank %d read %d bytes in %.1f s (%d through buffers: other dtypes, strides or devices)",
            self._directory,
            self._rank,
            nbytes,
            time.monotonic() - began,
            buffered,
        )
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextmanager
    def _step(self, method: str) -> Iterator[None]:
        """Show what torch calls for a load in traces, and its failure in the log."""
        with span("checkpoint", f"StorageReader.{method}", str(self._directory)):
            try:
                yield
            except BaseException as error:
                _log.info("%s: not loaded: %s", self._directory, error)
                raise

    def _reject_partly_loaded(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        found = find_partly_loaded(planner, plan, self._tensors)
        if found is None:
            return
        name, stored, wanted = found
        if self._of_one_rank:
            why = (
                "ranks that save without collectives can load only what each of them saved: load on as many "
                "ranks, with the tensor divided among them as it was when saved"
            )
        else:
            why = "the rest was not saved (no_dist=True on several ranks?); load another checkpoint"
        what = f"it has only {stored} of the {wanted} elements of {name!r} that this rank loads"
        raise Format(None, f"{self._directory}: {what}; {why}", str(self._directory))

    def _read_group(self, group: list[Request]) -> None:
        by_file: dict[DataFile, list[Request]] = {}
        for request in group:
            if request.nbytes > 0 and request.stored.file is not None:
                by_file.setdefault(request.stored.file, []).append(request)
        layouts = []
        chunks = []
        files = list(by_file)
        targets = settle_targets([request for of_file in by_file.values() for request in of_file])
        for file in files:
            layout = FileLayout(str(self._directory / file.name), file.nbytes)
            for begin, memory in targets[file]:
                layout.add_target(begin, memory)
            layouts.append(layout)
            chunks.append(self._add_checksums(layout, file, by_file[file]) if self._verify else [])
        if not layouts:
            return
        try:
            read_layouts(layouts, engine=self._engine, verify=self._verify)
        except Corrupt as error:
            at = getattr(error, "layout", None)
            if at is None:
                raise self._corrupt_file(error, files, by_file) from error
            raise self._corrupt_chunk(files[at], chunks[at][error.checksum]) from error  # type: ignore[attr-defined]
        except builtins.FileNotFoundError as error:
            raise self._corrupt_file(error, files, by_file) from error

    def _add_checksums(self, layout: FileLayout, file: DataFile, requests: list[Request]) -> list[int]:
        touched: set[int] = set()
        for request in requests:
            touched.update(range(request.begin // CHUNK_BYTES, -(-request.end // CHUNK_BYTES)))
        for chunk in sorted(touched):
            layout.add_checksum("crc32c", *file.chunk_range(chunk), file.chunk_crc(chunk))
        return sorted(touched)

    def _corrupt_chunk(self, file: DataFile, chunk: int) -> Corrupt:
        begin, end = file.chunk_range(chunk)
        names = self._names_in(file, begin, end)
        shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        shown = shown or "the header of the file"
        path = str(self._directory / file.name)
        error = Corrupt(
            None,
            f"{path} is corrupt: chunk {chunk} (bytes {begin} to {end}), which holds {shown}, does not match "
            f"the checksum it was written with; restore the file from a copy, or {self._instead}",
            path,
        )
        error.tensor, error.chunk = names[0] if names else None, chunk
        return error

    def _names_in(self, file: DataFile, begin: int, end: int) -> list[str]:
        """Return the names of the items that have bytes in this range of a file."""
        return [
            index.fqn
            for index, item in self._stored.items()
            if item.file == file and item.offset < end and item.offset + item.nbytes > begin
        ]

    def _corrupt_file(
        self, cause: OSError, files: list[DataFile], by_file: dict[DataFile, list[Request]]
    ) -> Exception:
        path = cause.filename
        for file in files:
            if str(self._directory / file.name) != path:
                continue
            what = "is missing" if isinstance(cause, builtins.FileNotFoundError) else "is corrupt"
            name = by_file[file][0].name
            target = missing_target(self._directory / file.name)
            why = (
                f"{cause.strerror}; restore the file from a copy, or load again if another save into the "
                "directory ended meanwhile"
                if target is None
                else f"it was in the volume {target.parent}; mount the disk of that volume"
            )
            error = Corrupt(None, f"{path} {what}, which holds {name!r} (and more): {why}", path)
            error.tensor = name
            return error
        return cause

    def _reject_two_formats(self, manifest: Path) -> None:
        """Raise Format for two checkpoints: which one is newer is unknown, since copies change file dates."""
        kind, name = "FileSystem", next(iter(list_torch_metadata(self._directory)), None)
        if name is None:
            kind, name = "HuggingFaceStorage", find_torch_safetensors(self._directory)
        if name is None:
            return
        if is_torch_temporary_metadata(name):
            raise Format(
                None,
                f"{self._directory} may hold two checkpoints: {manifest.name} of trunkline, and {name} of a "
                "save of torch's FileSystemWriter that was interrupted or is still running. If it was "
                f"torch's first save there, remove {name} to load {manifest.name}. If torch had saved there "
                "before, that checkpoint may be newer, and this save has replaced it: rename the file to "
                f"{name.removesuffix('.tmp')}, and load it with FileSystemReader",
                str(manifest),
            )
        raise Format(
            None,
            f"{self._directory} holds two checkpoints: {manifest.name} of trunkline and {name} of torch's "
            f"{kind}Writer, and it is unknown which is newer; load torch's with {kind}Reader, or remove the "
            f"one that you do not want ({manifest.name} or {name})",
            str(manifest),
        )

    def _why_none(self, path: Path) -> str:
        directory = path.parent
        if directory.exists() and not directory.is_dir():
            return f"{directory} is not a directory; name the directory of a checkpoint"
        if not directory.is_dir():
            return f"{directory}: there is no such directory"
        held = checkpointer_file(directory)
        if held == RECORD:
            return (
                f"{directory}: it is the directory of a node; load it with trunkline.dcp.Checkpointer("
                "DIRECTORY, local=True), or with trunkline.Checkpointer if that has saved it"
            )
        if held is not None:
            return (
                f"{directory}: it belongs to a trunkline.Checkpointer (it holds {held}); load it with "
                "trunkline.Checkpointer(DIRECTORY).load(STEP)"
            )
        if any(map(is_torch_metadata, list_torch_metadata(directory))):
            return f"{directory}: torch's FileSystemWriter wrote it; load it with FileSystemReader"
        if find_torch_safetensors(directory) is not None:
            return (
                f"{directory}: torch's HuggingFaceStorageWriter wrote it; load it with "
                "HuggingFaceStorageReader"
            )
        return f"{directory}: it holds no complete checkpoint ({path.name} is not there)"
