"""`trunkline checkpoint ls`, `show`, `verify` and `gc` for directories of trunkline.dcp."""

import datetime
import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trunkline._cli_errors import described
from trunkline._core import FileLayout
from trunkline._errors import Corrupt, Error, exception_of
from trunkline._formats.checkpoint_names import step_name, step_of
from trunkline._formats.dcp_names import MANIFEST
from trunkline._paths import file_size
from trunkline._progress import Progress
from trunkline._tensor_io.tensors import dtype_name
from trunkline._tensor_io.transfer import read_layouts
from trunkline.dcp import run_directory
from trunkline.dcp.stored_state import CHUNK_BYTES, DataFile, read_whole_manifest

_GROUP = 64  # chunks that are verified at once


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: a step of a run, or a directory that holds a single one (no step)."""

    folder: Path
    step: int | None
    commit: int
    digest: bytes

    def is_gone(self) -> bool:
        """Whether another process has removed it since it was found, or saved the step again."""
        try:
            return run_directory.digest_of(self.folder) != self.digest
        except OSError:
            return True

    def metadata(self) -> Metadata:
        """Read its manifest. Raises Corrupt, Format."""
        return read_whole_manifest(self.folder)


@dataclass(frozen=True)
class Mismatch:
    """What is wrong with a file; the fields are those of `verify --json`."""

    kind: str
    path: str
    shard: int
    chunk: int | None
    offset: int
    bytes: int
    tensors: list[str]
    message: str


def find(directory: str, step: int | None, *, every: bool = False) -> list[Checkpoint]:
    """Return the checkpoint of a step (None: the latest), or all. Raises FileNotFoundError."""
    path = Path(directory).absolute()
    if (path / MANIFEST).exists():
        if step is not None and step_of(path.name) != step:
            raise ValueError(f"--step: {directory} holds a single checkpoint; leave out the step")
        return [Checkpoint(path, step_of(path.name), 0, run_directory.digest_of(path))]
    commits = run_directory.commits_of(path, even_damaged=every or step is not None)
    found = [Checkpoint(path / step_name(each.step), each.step, each.number, each.digest) for each in commits]
    if every:
        return sorted(found, key=lambda each: each.step or 0)
    if not found:
        raise exception_of("system", errno.ENOENT, f"{directory} has no checkpoint yet", str(path))
    if step is None:
        return [found[-1]]
    run_directory.step_directory(path, step)
    return [each for each in found if each.step == step]


def files_of(metadata: Metadata) -> list[DataFile]:
    """Return the files of a checkpoint, by their names."""
    files = {item.file for item in metadata.storage_data.values() if item.file is not None}
    return sorted(files, key=lambda file: file.name)


def list_checkpoints(directory: str) -> dict[str, Any]:
    """Return the document of `ls`."""
    found = find(directory, None, every=True)
    latest = max(found, key=lambda each: (each.commit, each.step or 0), default=None)
    listed = [about for each in found if (about := _listed(each)) is not None]
    return {"latest": latest.step if latest else None, "checkpoints": listed}


def _listed(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return what `ls` says of a checkpoint; None if another process has removed it meanwhile."""
    try:
        about = _about(checkpoint)
    except OSError as error:
        if checkpoint.is_gone():
            return None
        about = {"errno": error.errno or 0, "message": str(error), "path": str(checkpoint.folder)}
        kind = "corrupt" if isinstance(error, Corrupt) else "format"
        return {"step": checkpoint.step, "error": {"kind": kind, **about}}
    return None if not about["is_complete"] and checkpoint.is_gone() else about


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    metadata = checkpoint.metadata()
    files = files_of(metadata)
    return {
        "step": checkpoint.step,
        **_described(checkpoint, metadata, files),
        "shards": len(files),
        "tensors": len(_tensors(metadata)),
        "is_complete": all(file_size(checkpoint.folder / file.name) == file.nbytes for file in files),
    }


def _described(checkpoint: Checkpoint, metadata: Metadata, files: list[DataFile]) -> dict[str, Any]:
    saved = (checkpoint.folder / MANIFEST).stat().st_mtime
    return {
        "commit": checkpoint.commit,
        "time": datetime.datetime.fromtimestamp(saved, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "world_size": len({file.name.partition("-")[0] for file in files}),
        "bytes": sum(file.nbytes for file in files),
    }


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def show(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the document of `show`."""
    metadata = checkpoint.metadata()
    files = files_of(metadata)
    numbers = {file: index for index, file in enumerate(files)}
    shards: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for index, item in metadata.storage_data.items():
        if item.file is not None:
            shards.setdefault(index.fqn, set()).add(numbers[item.file])
        sizes[index.fqn] = sizes.get(index.fqn, 0) + item.nbytes
    tensors = [
        {
            "name": name,
            "dtype": dtype_name(entry.properties.dtype),
            "shape": list(entry.size),
            "bytes": sizes.get(name, 0),
            "shards": sorted(shards.get(name, ())),
        }
        for name, entry in _tensors(metadata).items()
    ]
    return {
        "step": checkpoint.step,
        **_described(checkpoint, metadata, files),
        "chunk_bytes": CHUNK_BYTES,
        "shards": [
            {
                "path": str(checkpoint.folder / file.name),
                "bytes": file.nbytes,
                "chunks": len(file.crc32c) // 4,
            }
            for file in files
        ],
        "tensors": tensors,
    }


def verify(checkpoint: Checkpoint, *, may_be_gone: bool) -> dict[str, Any]:
    """Read a checkpoint, and return its entry in the document of `verify`.

    may_be_gone: it is fine if another process removes it meanwhile.
    """
    found = _verified(checkpoint)
    if not found["ok"] and checkpoint.is_gone():
        return {"step": checkpoint.step, "ok": may_be_gone, "removed": True}
    return found


def _verified(checkpoint: Checkpoint) -> dict[str, Any]:
    began = time.monotonic()
    try:
        metadata = checkpoint.metadata()
    except Error as error:
        about = {"kind": "corrupt", "errno": error.errno or 0, "message": str(error)}
        path = str(error.filename or checkpoint.folder)
        return {"step": checkpoint.step, "ok": False, "error": {**about, "path": path}}
    files = files_of(metadata)
    progress = Progress(f"verifying {checkpoint.folder}", sum(file.nbytes for file in files))
    found: list[Mismatch] = []
    try:
        for shard, file in enumerate(files):
            found += _verify_file(checkpoint.folder, shard, file, metadata, progress)
    finally:
        progress.close()
    return {
        "step": checkpoint.step,
        "commit": checkpoint.commit,
        "ok": not found,
        "bytes": sum(file.nbytes for file in files),
        "seconds": time.monotonic() - began,
        "mismatches": [vars(each) for each in found],
    }


def _verify_file(
    folder: Path, shard: int, file: DataFile, metadata: Metadata, progress: Progress
) -> Iterator[Mismatch]:
    path = folder / file.name
    size = file_size(path)

    def mismatch(kind: str, what: str, chunk: int | None = None) -> Mismatch:
        begin, end = (0, file.nbytes) if chunk is None else file.chunk_range(chunk)
        names = _names_in(metadata, file, begin, end)
        of = f", of {names[0]!r}" if names else ""
        return Mismatch(kind, str(path), shard, chunk, begin, end - begin, names, f"{path}: {what}{of}")

    if size != file.nbytes:
        progress.add(file.nbytes)
        what = "is missing" if size is None else f"has {size} bytes, not {file.nbytes}"
        yield mismatch("missing" if size is None else "size", what)
        return
    chunks = len(file.crc32c) // 4
    for first in range(0, chunks, _GROUP):
        group = range(first, min(first + _GROUP, chunks))
        try:
            if not _matches(path, file, group):
                for chunk in group:
                    if not _matches(path, file, [chunk]):
                        begin, end = file.chunk_range(chunk)
                        what = f"chunk {chunk} (bytes {begin} to {end}) does not match its checksum"
                        yield mismatch("checksum", what, chunk)
        except Corrupt:
            raise
        except OSError as error:
            yield mismatch("unread", f"cannot be read ({error})")
            return
        progress.add(file.chunk_range(group[-1])[1] - file.chunk_range(group[0])[0])


def _matches(path: Path, file: DataFile, chunks: "range | list[int]") -> bool:
    layout = FileLayout(str(path), file.nbytes)
    for chunk in chunks:
        layout.add_checksum("crc32c", *file.chunk_range(chunk), file.chunk_crc(chunk))
    try:
        read_layouts([layout])
    except Corrupt as error:
        if getattr(error, "checksum", None) is None:
            raise
        return False
    return True


def _names_in(metadata: Metadata, file: DataFile, begin: int, end: int) -> list[str]:
    names = {
        index.fqn: None
        for index, item in metadata.storage_data.items()
        if item.file == file and item.offset < end and item.offset + item.nbytes > begin
    }
    return list(names)


def collect(directory: str, *, dry_run: bool) -> dict[str, Any]:
    """Return the document of `gc`, once leftovers of interrupted saves are removed."""
    path = Path(directory).absolute()
    if (path / MANIFEST).exists():
        raise ValueError(f"{directory} holds a single checkpoint; the next save into it removes leftovers")
    try:
        with run_directory.locked(path):
            done = run_directory.collect(path, dry_run=dry_run)
    except Error as error:
        if error.errno != errno.EBUSY:
            raise
        return {"dry_run": dry_run, "busy": True, "bytes": 0, "removed": [], "problems": []}
    return {
        "dry_run": dry_run,
        "busy": False,
        "bytes": sum(nbytes for _, nbytes in done.removed),
        "removed": [{"path": name, "bytes": nbytes} for name, nbytes in done.removed],
        "problems": [described(error) for error in done.problems],
    }
