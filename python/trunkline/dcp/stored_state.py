"""A checkpoint of trunkline.dcp as a state whose tensors are still in its files."""

import errno
import io
import itertools
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trunkline._core import GcPause
from trunkline._errors import Format, Unsupported, exception_of
from trunkline._export.lazy_state import LazyState, no_key, placeholder_tensors
from trunkline._export.placeholders import Placeholders
from trunkline._export.stored import Integers, Piece, Pieces, Runs, SourceFile
from trunkline._export.window import Part, WindowReader
from trunkline._formats.dcp_names import last_dcp_step
from trunkline._formats.pt.loader import explanation
from trunkline._tensor_io.memory import empty_bytes
from trunkline.dcp._directory import list_manifests
from trunkline.dcp._reader import StorageReader
from trunkline.dcp._stored import CHUNK_BYTES, DTYPES, DataFile, StoredItem

__all__ = ["CHUNK_BYTES", "Box", "Boxes", "DataFile", "open_dcp", "read_whole_manifest"]

_PATHS = (str, int)  # what torch's planners make paths through a nested state of


class Box(NamedTuple):
    """A part of a tensor: where it begins, and its extents, in elements; and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: SourceFile
    begin: int


class Boxes:
    """A tensor that is stored in boxes, each in row-major order."""

    def __init__(self, shape: Sequence[int], itemsize: int, boxes: Sequence[Box]) -> None:
        """`boxes`: without those that are empty."""
        self._strides = [itemsize] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            self._strides[dim] = self._strides[dim + 1] * shape[dim + 1]
        self._boxes = [(box, *_cut(box, shape)) for box in boxes]
        self.nbytes = math.prod(shape) * itemsize
        self._itemsize = itemsize
        self.run_bytes = max(
            1, min((self._run(box, dim) for box, dim, _ in self._boxes), default=self.nbytes)
        )
        self.has_gaps = sum(math.prod(box.sizes) for box in boxes) * itemsize < self.nbytes

    def files(self) -> Iterator[SourceFile]:
        """Yield the files of the boxes."""
        for box, _, _ in self._boxes:
            yield box.file

    def runs(self, begin: int, end: int) -> Iterator[Runs]:
        """Yield the runs within bytes [begin, end) of the tensor."""
        for box, dim, outer in self._boxes:
            run = self._run(box, dim)
            count = math.prod(outer)
            low = self._first(box, outer, begin - run + 1)
            high = self._first(box, outer, end)
            if low >= high:
                continue
            indices = numpy.arange(low, min(high, count), dtype=numpy.int64)
            at = self._at(box, outer, indices)
            cut = numpy.maximum(begin - at, 0)
            nbytes = numpy.minimum(at + run, end) - at - cut
            yield Runs(box.file, at + cut, box.begin + indices * run + cut, nbytes)

    def _run(self, box: Box, dim: int) -> int:
        """Return the bytes of each run of a box: those of its dimensions from `dim` on."""
        return math.prod(box.sizes[dim:]) * self._itemsize

    def _at(self, box: Box, outer: Sequence[int], indices: Integers) -> Integers:
        """Return where in the tensor the runs of these numbers begin, in bytes."""
        at = numpy.full(len(indices), sum(map(int.__mul__, box.offsets, self._strides)), numpy.int64)
        for stride, places in zip(
            self._strides, numpy.unravel_index(indices, outer) if outer else (), strict=False
        ):
            at += places * stride
        return at

    def _first(self, box: Box, outer: Sequence[int], wanted: int) -> int:
        """Return the number of the first run that begins at byte `wanted` of the tensor or later."""
        low, high = 0, math.prod(outer)
        while low < high:
            middle = (low + high) // 2
            if int(self._at(box, outer, numpy.array([middle], numpy.int64))[0]) < wanted:
                low = middle + 1
            else:
                high = middle
        return low


def _cut(box: Box, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return from which dimension on a box is one run, and its extents before that."""
    dim = len(shape)
    while dim > 0 and (dim == len(shape) or box.sizes[dim] == shape[dim]):
        dim -= 1
    return dim, tuple(box.sizes[:dim])


def open_dcp(directory: "str | os.PathLike[str]", key: str | None = None) -> LazyState:
    """Return the state that a directory of trunkline.dcp holds, nested as it was saved, or a part of it.

    Reads the manifest, and the objects that are not tensors; these may only be of types that
    torch.load(weights_only=True) allows. Raises FileNotFoundError if there is no checkpoint, ValueError for a
    key that it does not have, Unsupported, Corrupt, Format.
    """
    path = Path(directory).absolute()
    metadata = read_whole_manifest(path)
    with GcPause():
        return _state_of(metadata, path, key)


def read_whole_manifest(path: Path) -> Metadata:
    """Read the manifest of a checkpoint that one save of all ranks has made.

    Raises FileNotFoundError, Unsupported for one that was saved without collectives, Corrupt, Format.
    """
    manifests = list_manifests(path)
    if not manifests:
        step = last_dcp_step(str(path))
        why = f"{path} holds no checkpoint of trunkline.dcp"
        if step is not None:
            why = (
                f"{path} holds the steps of a run, not a single checkpoint; name one of them, such as {step}"
            )
        raise exception_of("system", errno.ENOENT, why, str(path))
    if manifests[0] != "dcp.manifest":
        raise Unsupported(
            None,
            f"{path} was saved with use_collectives=False: each rank has its own part ({manifests[0]}), and "
            "none knows the whole; load it on the ranks that saved it",
            str(path),
        )
    return StorageReader(path).read_metadata()


def _state_of(metadata: Metadata, path: Path, key: str | None) -> LazyState:
    paths = paths_below(metadata, key, str(path))
    files: dict[DataFile, SourceFile] = {}
    items: dict[str, list[tuple[tuple[int, ...], StoredItem]]] = {}
    for index, item in metadata.storage_data.items():
        items.setdefault(index.fqn, []).append((tuple(index.offset or ()), item))
        if item.file is not None and item.file not in files:
            files[item.file] = SourceFile(
                str(path / item.file.name), item.file.nbytes, CHUNK_BYTES, _Sums(item.file)
            )
    entries = metadata.state_dict_metadata
    names = [name for name in paths if isinstance(entries[name], TensorStorageMetadata)]
    described: list[tuple[torch.dtype, tuple[int, ...]]] = []
    stored: list[Boxes] = []
    for name in names:
        entry = entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        described.append((entry.properties.dtype, tuple(entry.size)))
        stored.append(_boxes_of(name, entry, items.get(name, []), files, path))
    placeholders = Placeholders([each.nbytes for each in stored])
    values: dict[str, Any] = dict(zip(names, placeholder_tensors(placeholders, described), strict=True))
    values.update(_objects([name for name in paths if name not in values], items, files, path))
    whole = nested({name: (paths[name], values[name]) for name in paths})
    return LazyState(whole, placeholders, names, stored, str(path))


def paths_below(metadata: Metadata, key: str | None, source: str) -> dict[str, tuple[Any, ...]]:
    """Return the items below a key, each with its path from there on."""
    planner_data = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths: dict[str, tuple[Any, ...]] = {}
    for name in metadata.state_dict_metadata:
        path = planner_data.get(name)
        is_path = (
            isinstance(path, tuple | list) and len(path) > 0 and all(type(each) in _PATHS for each in path)
        )
        paths[name] = tuple(path) if is_path and path else (name,)
    if key is None:
        return paths
    below = {}
    for name, path in paths.items():
        rest = _without_key(path, key)
        if rest is not None:
            below[name] = rest
    if not below:
        raise no_key(key, list(dict.fromkeys(path[0] for path in paths.values())), source)
    return below


def _without_key(path: tuple[Any, ...], key: str) -> tuple[Any, ...] | None:
    """Return the path below a key, which may be several with dots between them; None if it is elsewhere."""
    for count in range(1, len(path)):
        head = ".".join(map(str, path[:count]))
        if head == key:
            return path[count:]
    flat = str(path[0])  # as saved by a planner that does not flatten: the dots are in the name itself
    return (flat[len(key) + 1 :], *path[1:]) if len(path) == 1 and flat.startswith(f"{key}.") else None


class _Sums(Sequence[int]):
    """The checksums of a file, without a Python integer for each."""

    def __init__(self, file: DataFile) -> None:
        self._file = file

    def __len__(self) -> int:
        return len(self._file.crc32c) // 4

    def __getitem__(self, chunk: Any) -> Any:
        return self._file.chunk_crc(chunk)


def _boxes_of(
    name: str,
    entry: TensorStorageMetadata,
    items: list[tuple[tuple[int, ...], StoredItem]],
    files: dict[DataFile, SourceFile],
    path: Path,
) -> Boxes:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    boxes = []
    for offsets, item in items:
        if item.shape is None or DTYPES[item.dtype or ""] != dtype or len(item.shape) != len(shape):
            raise Format(None, f"{path}: {name!r} is not stored as its entry describes it", str(path))
        offsets = offsets if offsets else (0,) * len(shape)
        inside = all(at + size <= extent for at, size, extent in zip(offsets, item.shape, shape, strict=True))
        if not inside:
            raise Format(None, f"{path}: a chunk of {name!r} is outside of the tensor", str(path))
        if item.file is not None and item.nbytes > 0:
            boxes.append(Box(offsets, item.shape, files[item.file], item.offset))
    boxes.sort(key=lambda box: box.offsets)
    return Boxes(shape, dtype.itemsize, boxes)


def _objects(
    names: list[str],
    items: dict[str, list[tuple[tuple[int, ...], StoredItem]]],
    files: dict[DataFile, SourceFile],
    path: Path,
) -> dict[str, Any]:
    """Return the values that are not tensors, unpickled with weights_only."""
    memory: dict[str, torch.Tensor] = {}
    parts: list[Part] = []
    for name in names:
        found = items.get(name, [])
        if len(found) != 1 or found[0][1].shape is not None or found[0][1].file is None:
            raise Format(None, f"{path}: {name!r} is not stored as an object", str(path))
        item = found[0][1]
        assert item.file is not None
        memory[name] = empty_bytes(item.nbytes)
        pieces = Pieces([Piece(files[item.file], item.offset, item.nbytes)])
        parts.append(Part(pieces, 0, item.nbytes, memory[name].data_ptr(), name))
    with WindowReader() as reader:
        reader.read(parts, memory)
    return {name: unpickled(bytes(data.numpy()), name, path) for name, data in memory.items()}


def unpickled(data: bytes, name: str, path: "Path | str") -> Any:
    """Return an object. Raises Unsupported, naming it, for a type that weights_only does not allow."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unsupported(
            None,
            f"{path}: the object {name!r} is of a type that torch.load(weights_only=True) does not allow; "
            "pass its class to torch.serialization.add_safe_globals, or export a part of the state (key=). "
            f"{explanation(error)}",
            str(path),
        ) from None


def nested(values: dict[str, tuple[tuple[Any, ...], Any]]) -> Any:
    """Return the nested state: strings of paths are keys of dicts, integers are indices of lists."""
    root: dict[Any, Any] = {}
    for path, value in values.values():
        at: Any = root
        for here, following in itertools.pairwise(path):
            at = _enter(at, here, {} if type(following) is str else [])
        _put(at, path[-1], value)
    return root


def _enter(container: Any, key: Any, empty: Any) -> Any:
    if isinstance(container, dict):
        return container.setdefault(key, empty)
    _extend(container, key)
    if container[key] is None:
        container[key] = empty
    return container[key]


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, list):
        _extend(container, key)
    container[key] = value


def _extend(values: list[Any], index: int) -> None:
    values.extend([None] * (index + 1 - len(values)))
