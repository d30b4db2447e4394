"""Packs: the weights of a model in one file that is read as it is used. docs/formats/pack.md."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trunkline import _core
from trunkline._core import File, Volume, crc32c
from trunkline._errors import Corrupt, Format
from trunkline.checkpoint._safetensors_load import Header
from trunkline.checkpoint._tensors import bytes_of, contiguous
from trunkline.stream import _manifest
from trunkline.stream._manifest import Manifest, Recipe, SourceFile
from trunkline.stream._pack_layout import Layout, lay_out
from trunkline.stream._progress import Progress
from trunkline.stream._source import Source
from trunkline.stream._tensors import Stored

_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Place:
    """Where a pack is: its manifest in the first directory, its weights in all of them."""

    directories: tuple[Path, ...]

    def open(self, mode: str = "r") -> File:
        """Open the weights."""
        if len(self.directories) == 1:
            return _core.open(self.directories[0] / _WEIGHTS, mode)  # type: ignore[arg-type]
        return Volume([str(each) for each in self.directories]).open(_WEIGHTS, mode)  # type: ignore[arg-type]

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


def find(place: Place, headers: Sequence[Header], recipe: Recipe) -> Manifest | None:
    """Return the manifest of a pack that was made from these very files by this recipe; None for others.

    Files that look as they did then (size, time, header) are taken for the same. Where only times differ, as
    in a copy of a folder, their contents decide. Raises Format for a manifest that cannot be read.
    """
    manifest = _manifest.read(place.directories[0])
    if (
        manifest is None
        or manifest.recipe != recipe
        or manifest.volumes != len(place.directories)
        or len(manifest.source) != len(headers)
    ):
        return None
    now = [_look(header) for header in headers]
    same = [
        _without_time(was) == _without_time(replace(is_, data_crc32c=was.data_crc32c))
        for was, is_ in zip(manifest.source, now, strict=True)
    ]
    if not all(same) or not _has_weights(place, manifest):
        return None
    touched = [
        index
        for index, (was, is_) in enumerate(zip(manifest.source, now, strict=True))
        if was.modified_ns != is_.modified_ns
    ]
    if not touched:
        return manifest
    for index in touched:
        with Source([headers[index]]) as source:
            if source.data_checksums() != [manifest.source[index].data_crc32c]:
                return None
        manifest.source[index] = replace(manifest.source[index], modified_ns=now[index].modified_ns)
    with suppress(OSError):  # next time they are looked through again
        manifest.write(place.directories[0])
    return manifest


def make(
    place: Place,
    headers: Sequence[Header],
    recipe: Recipe,
    tensors: Sequence[Stored],
    starts: set[str],
    source: Source,
    contents: Iterator[tuple[str, torch.Tensor]],
) -> Manifest:
    """Write a pack of `tensors`, in their order, whose values `contents` yields from `source`, in any order.

    Nothing of it is there before all of it is durable. `starts`: see lay_out(). Memory is needed for one
    tensor that is written, and what `source` reads ahead. `source`, of these headers, is closed. Raises
    OSError for what cannot be written; nothing is left of it then.
    """
    for directory in place.directories:
        directory.mkdir(parents=True, exist_ok=True)
    place.remove()
    layout = lay_out(tensors, starts)
    before = [_look(header) for header in headers]
    try:
        with place.open("x") as file, source:
            manifest = Manifest(_WEIGHTS, layout.nbytes, len(place.directories), recipe, before)
            manifest.tensors = _write(file, layout, contents)
            file.sync()
            manifest.source = [
                replace(was, data_crc32c=checksum)
                for was, checksum in zip(before, source.data_checksums(), strict=True)
            ]
        for directory in place.directories:
            _core.fsync_directory(directory)
        for was, header in zip(before, headers, strict=True):
            if _look(header) != was:
                raise Corrupt(None, f"{header.path} was modified while a pack was made from it", header.path)
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


def _look(header: Header) -> SourceFile:
    status = os.stat(header.path)  # noqa: PTH116 - a str, as messages show it
    return SourceFile(
        name=os.path.basename(header.path),  # noqa: PTH119
        nbytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        head_sha256=hashlib.sha256(header.head).hexdigest(),
        data_crc32c=0,
    )


def _without_time(file: SourceFile) -> SourceFile:
    return replace(file, modified_ns=0)
