"""Packs: the weights of a model in one file, in the order of their use. docs/formats/pack.md."""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch

from trunkline import _core
from trunkline._core import File, crc32c, crc32c_combine
from trunkline._errors import Corrupt, Format
from trunkline._formats.safetensors.loader import Header
from trunkline._logging import Log
from trunkline._progress import Progress
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming.layout import Layout
from trunkline._streaming.location import MARK_BYTES, WEIGHTS, PackLocation
from trunkline._streaming.manifest import Manifest, Recipe, SourceFile
from trunkline._streaming.source import Source
from trunkline._streaming.stored import FileTensor
from trunkline._tensor_io.tensors import bytes_of, contiguous
from trunkline._trace import span

_log = Log("stream")

_INCOMPLETE = (FileNotFoundError, NotADirectoryError, Corrupt, Format)  # raised by opening such weights
_SETTLED_NS = 20_000_000  # timestamps of files have the resolution of the kernel's ticks, of up to 10 ms


class Contents(NamedTuple):
    """A tensor of a pack, or slices of its first dimension, from slice `first` on."""

    name: str
    tensor: torch.Tensor
    first: int | None = None


def find(location: PackLocation, headers: Sequence[Header], recipe: Recipe) -> Manifest | None:
    """Return the manifest of the pack, if it was made from exactly these files by this recipe; else None.

    Files with the same size, times, inode and header count as unchanged. Where only times and inode differ,
    as in a copy of a folder, the checksums of their contents decide. Raises Format for a manifest that cannot
    be read.
    """
    manifest = pack_manifest.read(location.directories[0])
    if manifest is None:
        _log.info("%s: there is no pack", location.display_name)
        return None
    now: list[SourceFile] = []
    difference = _difference_of_recipes(location, manifest, recipe, len(headers))
    if difference is None:
        now = file_versions(headers)
        difference = _difference_of_files(location, manifest, now)
    if difference is not None:
        _log.info("%s: the pack there is not used: %s", location.display_name, difference)
        return None
    changed_times = [
        index
        for index, (was, is_) in enumerate(zip(manifest.source, now, strict=True))
        if replace(was, data_crc32c=0) != is_
    ]
    if not changed_times:
        return manifest
    source = list(now)
    for index, was in enumerate(manifest.source):
        source[index] = replace(now[index], data_crc32c=was.data_crc32c)
    for index in changed_times:
        with Source([headers[index]]) as file:
            if file.data_checksums() != [source[index].data_crc32c]:
                name = headers[index].path
                _log.info("%s: the pack there is not used: %s has changed", location.display_name, name)
                return None
    _log.debug(
        "%s: %d files have other times than when the pack was made, but the same contents",
        location.display_name,
        len(changed_times),
    )
    renewed = replace(manifest, source=source)
    # If it cannot be written now, the files are read again next time. A process that makes another pack here
    # has removed this one's manifest, which must not come back.
    with suppress(OSError), location.lock(wait=False) as locked:
        if locked and pack_manifest.read(location.directories[0]) == manifest:
            renewed.write(location.directories[0])
    return renewed


def _difference_of_recipes(
    location: PackLocation, manifest: Manifest, recipe: Recipe, count: int
) -> str | None:
    """Return why the pack is not one of `count` files by this recipe, for the log; None if it may be."""
    was = manifest.recipe
    if was.config_sha256 != recipe.config_sha256:
        return "it is of another config.json"
    if was.dtype != recipe.dtype:
        return f"it is of dtype {was.dtype}, not {recipe.dtype}"
    if was.converter != recipe.converter:
        return f"its tensors were converted by {was.converter or 'none'}, not {recipe.converter or 'none'}"
    if was != recipe:
        return "it was made by another recipe"
    if manifest.volumes != len(location.directories):
        return f"it is striped over {manifest.volumes} directories, not {len(location.directories)}"
    if len(manifest.source) != count:
        return f"it was made from {len(manifest.source)} files, not {count}"
    return None


def _difference_of_files(location: PackLocation, manifest: Manifest, now: Sequence[SourceFile]) -> str | None:
    """Return why the pack is not one of these files, or is damaged; None if it may be one, but for times."""
    for before, file in zip(manifest.source, now, strict=True):
        if _without_times(before) != _without_times(file):
            return f"{file.name} has changed"
    return None if _has_weights(location, manifest) else f"its {manifest.weights} is missing or incomplete"


def make(
    location: PackLocation,
    headers: Sequence[Header],
    recipe: Recipe,
    layout: Layout,
    before: Sequence[SourceFile],
    source: Source,
    contents: Iterator[Contents],
    model: str,
) -> Manifest:
    """Write a pack of tensors whose values `contents` yields from `source`, in any order.

    The pack exists only once all of it is durable. `before`: file_versions() from before `source` opened the
    files. `model`: how the user calls it. The location must be locked. Needs memory for one of `contents`,
    and for what `source` reads ahead. Closes `source`. Raises OSError for other files in the way, and for
    errors of writing; then nothing is left of the pack.
    """
    began = time.monotonic()
    _log.info(
        "%s: making a pack of %d weights (%d bytes) from %d files",
        location.display_name,
        len(layout.tensors),
        layout.nbytes,
        len(headers),
    )
    with source, span("stream", "make a pack", location.display_name):
        try:
            previous = location.check_no_conflict(headers)
        except Exception as error:
            _log.info("%s: no pack was made: %s", location.display_name, error)
            raise
        if previous is not None:
            _log.info("%s: removing the weights of the pack before", previous.display_name)
            previous.remove_weights()
        location.remove()
        file = location.open("x")  # from here on the file is this pack's
        try:
            with file:
                location.restrict_access([header.path for header in headers])  # before anything is written
                manifest = Manifest(
                    WEIGHTS, layout.nbytes, len(location.directories), recipe, [], model=model
                )
                if manifest.volumes > 1:
                    manifest.directories = [str(directory.resolve()) for directory in location.directories]
                manifest.tensors = _write(file, layout, contents, f"packing {model}")
                file.sync()
                manifest.source = [
                    replace(was, data_crc32c=checksum)
                    for was, checksum in zip(before, source.data_checksums(), strict=True)
                ]
            for directory in location.directories:
                _core.fsync_directory(directory)
            check_unchanged(headers, before)
            manifest.write(location.directories[0])
        except BaseException as error:
            _log.info("%s: no pack was made: %s", location.display_name, error)
            with suppress(OSError):
                location.remove()
            raise
        _log.info("%s: the pack is made, in %.1f s", location.display_name, time.monotonic() - began)
        return manifest


def _write(file: File, layout: Layout, contents: Iterator[Contents], what: str) -> list[FileTensor]:
    places = {stored.name: stored for stored in layout.tensors}
    checksums: dict[str, dict[int, int]] = {}  # of the slices that are written, or of the whole, as slice 0
    progress = Progress(what, layout.nbytes, log=_log)
    try:
        # First the mark: also a file that a crash left incomplete must be known as a pack.
        file.pwrite(layout.head[:MARK_BYTES], 0)
        file.sync()
        file.truncate(layout.nbytes)
        for each in contents:
            stored = places[each.name]
            _check_kind(each, stored)
            data = bytes_of(contiguous(each.tensor))
            nbytes = stored.nbytes // max(1, stored.slices)
            first = each.first or 0
            writing = file.async_pwrite(data, stored.offset + first * nbytes) if len(data) else None
            checksums.setdefault(each.name, {}).update(
                (first + number, crc32c(data[at : at + nbytes]))
                for number, at in enumerate(range(0, len(data), max(1, nbytes)))
            )
            if writing is not None:
                writing.result()
            progress.add(len(data))
        file.pwrite(layout.head, 0)
    finally:
        progress.close()
    missing = [each.name for each in layout.tensors if not _is_whole(each, checksums.get(each.name))]
    if missing:
        raise Format(None, f"cannot make the pack: the tensors {sorted(missing)[:4]} are missing")
    return [_with_checksums(stored, checksums[stored.name]) for stored in layout.tensors]


def _check_kind(contents: Contents, stored: FileTensor) -> None:
    """Raise Format if a tensor, or slices of it, are not as the layout has them."""
    tensor, shape = contents.tensor, tuple(contents.tensor.shape)
    expected = stored.shape
    if contents.first is not None and stored.slices and contents.first + len(tensor) <= stored.slices:
        expected = (len(tensor), *stored.shape[1:])
    if tensor.dtype != stored.dtype or shape != expected:
        raise Format(
            None,
            f"cannot make the pack: the tensor {contents.name!r} is {tensor.dtype} {list(shape)}, "
            f"expected {stored.dtype} {list(expected)}",
        )


def _is_whole(stored: FileTensor, checksums: Mapping[int, int] | None) -> bool:
    """Whether a tensor is written, all slices of it."""
    if checksums is None:
        return False
    return not stored.nbytes or len(checksums) == max(1, stored.slices)


def _with_checksums(stored: FileTensor, checksums: Mapping[int, int]) -> FileTensor:
    """Return the tensor with the checksums of its bytes. checksums: of its slices, or of the whole."""
    if not stored.nbytes:
        return replace(stored, checksum=0)
    if not stored.slices:
        return replace(stored, checksum=checksums[0])
    nbytes = stored.nbytes // stored.slices
    slices = tuple(checksums[number] for number in range(stored.slices))
    whole = reduce(lambda checksum, of_slice: crc32c_combine(checksum, of_slice, nbytes), slices, 0)
    return replace(stored, checksum=whole, slice_checksums=slices)


def open_weights(location: PackLocation, manifest: Manifest, count: int) -> list[File] | None:
    """Open the weights of a manifest `count` times; None if the manifest has been replaced or removed."""
    files: list[File] = []
    try:
        for _ in range(count):
            files.append(location.open())  # noqa: PERF401 - those before an error are to be closed
        # While a manifest exists, so do its weights: replacing a pack removes its manifest first.
        now = pack_manifest.read(location.directories[0])
    except _INCOMPLETE:
        now = None
    if now is not None and (now.nbytes, now.tensors) == (manifest.nbytes, manifest.tensors):
        return files
    for file in files:
        file.close()
    return None


def _has_weights(location: PackLocation, manifest: Manifest) -> bool:
    try:
        with location.open() as file:
            return file.size == manifest.nbytes
    except _INCOMPLETE:
        return False


def file_versions(headers: Sequence[Header]) -> list[SourceFile]:
    """Return what identifies the present version of each file. Raises Corrupt if a header has changed."""
    return [_file_version(header) for header in headers]


def check_unchanged(headers: Sequence[Header], before: Sequence[SourceFile]) -> None:
    """Raise Corrupt unless the files are still those of `before`."""
    for header, was, now in zip(headers, before, file_versions(headers), strict=True):
        if was != now:
            raise _changed(header)


def _file_version(header: Header) -> SourceFile:
    with open(header.path, "rb") as file:  # noqa: PTH123 - a str, as messages show it
        status = os.fstat(file.fileno())
        # A write in the same tick as the last change does not change the file's timestamp.
        age_ns = time.time_ns() - status.st_ctime_ns
        if 0 <= age_ns < _SETTLED_NS:
            time.sleep((_SETTLED_NS - age_ns) / 1e9)
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
    message = (
        f"{header.path} was modified or replaced while it was being read; load it again once it is complete"
    )
    return Corrupt(None, message, header.path)


def _without_times(file: SourceFile) -> SourceFile:
    """Return what a copy of the file shares with it, apart from the checksum of its data."""
    return replace(file, modified_ns=0, changed_ns=0, inode=0, data_crc32c=0)
