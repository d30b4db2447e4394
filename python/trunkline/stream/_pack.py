"""Packs: the weights of a model in one file that is read as it is used. docs/formats/pack.md."""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trunkline import _core
from trunkline._core import File, Volume, crc32c
from trunkline._errors import Corrupt, Format, exception_of
from trunkline.checkpoint._safetensors_load import Header
from trunkline.checkpoint._tensors import bytes_of, contiguous
from trunkline.stream import _manifest
from trunkline.stream._manifest import Manifest, Recipe, SourceFile
from trunkline.stream._pack_layout import MARK, Layout, lay_out
from trunkline.stream._progress import Progress
from trunkline.stream._source import Source
from trunkline.stream._tensors import Stored

_WEIGHTS = "weights.safetensors"
_MOST_HEAD_BYTES = 100_000_000  # as the format allows
_LOCK_SECONDS = 0.1  # between two attempts


@dataclass(frozen=True)
class Place:
    """Where a pack is: its manifest in the first directory, its weights in all of them."""

    directories: tuple[Path, ...]

    def open(self, mode: str = "r") -> File:
        """Open the weights."""
        if len(self.directories) == 1:
            return _core.open(self.directories[0] / _WEIGHTS, mode)  # type: ignore[arg-type]
        return Volume([str(each) for each in self.directories]).open(_WEIGHTS, mode)  # type: ignore[arg-type]

    @property
    def shown(self) -> str:
        """The directories, for messages."""
        return ", ".join(map(str, self.directories))

    def remove(self) -> None:
        """Remove what is there; first the manifest, so that there is never one without its weights."""
        manifest = self.directories[0] / _manifest.NAME
        with suppress(FileNotFoundError):
            manifest.unlink()
            _core.fsync_directory(self.directories[0])
        with suppress(FileNotFoundError):
            if len(self.directories) == 1:
                (self.directories[0] / _WEIGHTS).unlink()
            else:
                Volume([str(each) for each in self.directories]).remove(_WEIGHTS)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold others off who want to make a pack here; wait for those who do. The directories are made."""
        for directory in self.directories:
            directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directories[0], os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # a filesystem without locks
                while not _try_lock(descriptor):
                    time.sleep(_LOCK_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def check_is_free(self, headers: Sequence[Header]) -> None:
        """Raise an error where the name of the weights is taken by a file that is no pack's."""
        if len(self.directories) > 1:
            return  # a striped file has a descriptor of ours
        weights = self.directories[0] / _WEIGHTS
        taken = any(weights.exists() and weights.samefile(header.path) for header in headers) or not _is_ours(
            weights
        )
        if taken:
            raise exception_of(
                "system",
                errno.EEXIST,
                f"{weights} is there, and no part of a pack; give another directory for the pack",
                str(weights),
            )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_ours(weights: Path) -> bool:
    """Whether it is a file that a pack was made of, or what a crash left of one (which begins with zeros)."""
    try:
        with weights.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length == 0:
                return True
            if length > _MOST_HEAD_BYTES:
                return False
            head = json.loads(file.read(length))
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return isinstance(head, dict) and MARK in (head.get("__metadata__") or {})


def find(place: Place, headers: Sequence[Header], recipe: Recipe) -> Manifest | None:
    """Return the manifest of a pack that was made from these very files by this recipe; None for others.

    Files that look as they did then (size, times, inode, header) are taken for the same. Where only times and
    inode differ, as in a copy of a folder, their contents decide. Raises Format for a manifest that cannot be
    read.
    """
    manifest = _manifest.read(place.directories[0])
    if (
        manifest is None
        or manifest.recipe != recipe
        or manifest.volumes != len(place.directories)
        or len(manifest.source) != len(headers)
    ):
        return None
    now = look(headers)
    same = [_lasting(was) == _lasting(is_) for was, is_ in zip(manifest.source, now, strict=True)]
    if not all(same) or not _has_weights(place, manifest):
        return None
    touched = [
        index
        for index, (was, is_) in enumerate(zip(manifest.source, now, strict=True))
        if replace(was, data_crc32c=0) != is_
    ]
    if not touched:
        return manifest
    for index in touched:
        with Source([headers[index]]) as source:
            if source.data_checksums() != [manifest.source[index].data_crc32c]:
                return None
        manifest.source[index] = replace(now[index], data_crc32c=manifest.source[index].data_crc32c)
    with suppress(OSError):  # next time they are looked through again
        manifest.write(place.directories[0])
    return manifest


def make(
    place: Place,
    headers: Sequence[Header],
    recipe: Recipe,
    tensors: Sequence[Stored],
    starts: set[str],
    before: Sequence[SourceFile],
    source: Source,
    contents: Iterator[tuple[str, torch.Tensor]],
) -> Manifest:
    """Write a pack of `tensors`, in their order, whose values `contents` yields from `source`, in any order.

    Nothing of it is there before all of it is durable. `starts`: see lay_out(). `before`: look() at the files
    before `source` opened them. The place is locked, and free. Memory is needed for one
    tensor that is written, and what `source` reads ahead. `source`, of these headers, is closed. Raises
    OSError for what cannot be written; nothing is left of it then.
    """
    place.remove()
    layout = lay_out(tensors, starts)
    try:
        with place.open("x") as file, source:
            manifest = Manifest(_WEIGHTS, layout.nbytes, len(place.directories), recipe, [])
            manifest.tensors = _write(file, layout, contents)
            file.sync()
            manifest.source = [
                replace(was, data_crc32c=checksum)
                for was, checksum in zip(before, source.data_checksums(), strict=True)
            ]
        for directory in place.directories:
            _core.fsync_directory(directory)
        check_unchanged(headers, before)
        manifest.write(place.directories[0])
    except BaseException:
        with suppress(OSError):
            place.remove()
        raise
    return manifest


def _write(file: File, layout: Layout, contents: Iterator[tuple[str, torch.Tensor]]) -> list[Stored]:
    places = {stored.name: stored for stored in layout.tensors}
    written: dict[str, Stored] = {}
    progress = Progress("packing", layout.nbytes)
    try:
        file.truncate(layout.nbytes)
        for name, tensor in contents:
            stored = places[name]
            if tensor.dtype != stored.dtype or tuple(tensor.shape) != stored.shape:
                raise Format(
                    None,
                    f"the tensor {name!r} is {tensor.dtype} {list(tensor.shape)} where {stored.dtype} "
                    f"{list(stored.shape)} was expected",
                )
            data = bytes_of(contiguous(tensor))
            writing = file.async_pwrite(data, stored.offset) if stored.nbytes else None
            written[name] = replace(stored, checksum=crc32c(data) if stored.nbytes else 0)
            if writing is not None:
                writing.result()
            progress.add(stored.nbytes)
        file.pwrite(layout.head, 0)
    finally:
        progress.close()
    missing = places.keys() - written.keys()
    if missing:
        raise Format(None, f"the tensors {sorted(missing)[:4]} were not found")
    return [written[stored.name] for stored in layout.tensors]


def _has_weights(place: Place, manifest: Manifest) -> bool:
    try:
        with place.open() as file:
            return file.size == manifest.nbytes
    except OSError:
        return False


def look(headers: Sequence[Header]) -> list[SourceFile]:
    """Return what identifies the files now. Raises Corrupt for one that has another header by now."""
    return [_look(header) for header in headers]


def check_unchanged(headers: Sequence[Header], before: Sequence[SourceFile]) -> None:
    """Raise Corrupt unless the files are those that look() saw."""
    for header, was, now in zip(headers, before, look(headers), strict=True):
        if was != now:
            raise _changed(header)


def _look(header: Header) -> SourceFile:
    with open(header.path, "rb") as file:  # noqa: PTH123 - a str, as messages show it
        status = os.fstat(file.fileno())
        head = file.read(len(header.head))
    if head != header.head or status.st_size != header.file_bytes:
        raise _changed(header)
    return SourceFile(
        name=os.path.basename(header.path),  # noqa: PTH119
        nbytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        head_sha256=hashlib.sha256(head).hexdigest(),
        data_crc32c=0,
        changed_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def _changed(header: Header) -> Corrupt:
    message = f"{header.path} was modified or replaced while it was read; load it again when it is complete"
    return Corrupt(None, message, header.path)


def _lasting(file: SourceFile) -> SourceFile:
    """What a copy of the file has too, and can be seen without reading all of it."""
    return replace(file, modified_ns=0, changed_ns=0, inode=0, data_crc32c=0)
