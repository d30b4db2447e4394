"""Requests to read bytes of files into tensors or memory."""

import io
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from trunkline._core import aligned_empty
from trunkline._errors import Corrupt, Format
from trunkline._tensor_io.memory import is_in_reach
from trunkline._tensor_io.tensors import bytes_of
from trunkline.dcp._stored import ALIGNMENT, DTYPES, DataFile, StoredItem

# Bytes that are not read directly into tensors are buffered until they are copied: at most this many at once,
# or one item.
MAX_BUFFERED_BYTES = 1 << 30


class Request:
    """Bytes [begin, end) of a file, for one item of a plan.

    For a tensor it is the shortest range that contains the requested part; with `gaps` it contains other
    elements too.
    """

    def __init__(self, item: ReadItem, stored: StoredItem, target: torch.Tensor | None) -> None:
        self.item = item
        self.name = item.storage_index.fqn
        self.stored = stored
        self.target = target  # None: bytes
        self.begin = stored.offset
        self.end = stored.offset + stored.nbytes
        self.gaps = False
        if target is not None:
            self._cut_out(item.storage_offsets, item.lengths)
        self.direct = target is not None and not self.gaps and _can_read_directly(target, stored)
        self.memory: torch.Tensor | None = None  # uint8, of [begin, end)

    @classmethod
    def of_bytes(cls, index: MetadataIndex, stored: StoredItem, begin: int, end: int) -> "Request":
        """Make a request for bytes [begin, end) of what is stored, whatever they are."""
        item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size(()), index, torch.Size(()), torch.Size(()))
        request = cls(item, stored, None)
        request.begin, request.end = stored.offset + begin, stored.offset + end
        return request

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.end - self.begin

    def _cut_out(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        strides = _strides(self.stored.shape or ())
        itemsize = DTYPES[self.stored.dtype or ""].itemsize
        if math.prod(lengths) == 0:
            self.end = self.begin
            return
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        self.begin += first * itemsize
        self.end = self.begin + (last + 1 - first) * itemsize
        self.gaps = last + 1 - first != math.prod(lengths)

    def hand_over(self, planner: LoadPlanner) -> None:
        """Pass the data to the planner."""
        if self.target is None:
            data = b"" if self.memory is None else self.memory.numpy().tobytes()
            self.memory = None
            planner.load_bytes(self.item, io.BytesIO(data))
            return
        if not self.direct and self.memory is not None:
            source = self.memory.view(DTYPES[self.stored.dtype or ""])
            strides = _strides(self.stored.shape or ()) if self.gaps else _strides(self.item.lengths)
            self.target.copy_(source.as_strided(tuple(self.item.lengths), strides, source.storage_offset()))
            self.memory = None
        planner.commit_tensor(self.item, self.target)


def make_request(
    item: ReadItem, stored_items: dict[MetadataIndex, StoredItem], planner: LoadPlanner, path: str
) -> Request:
    """Look up where an item is stored, and its target. Raises Corrupt, Format or ValueError, naming it."""
    name = item.storage_index.fqn
    stored = stored_items.get(item.storage_index)
    if stored is None:
        error = Corrupt(
            None,
            f"{path}: no file contains {name!r} at {item.storage_index.offset}, which the plan requires",
            path,
        )
        error.tensor = name
        raise error
    if item.type == LoadItemType.BYTE_IO:
        if stored.dtype is not None:
            raise Format(None, f"{path}: {name!r} is stored as a tensor, the plan requires an object", path)
        return Request(item, stored, None)
    if stored.shape is None:
        raise Format(None, f"{path}: {name!r} is stored as an object, the plan requires a tensor", path)
    if not _within(stored.shape, item.storage_offsets, item.lengths):
        raise Format(
            None,
            f"{path}: {name!r} is stored with the shape {list(stored.shape)}, the plan requires "
            f"{list(item.lengths)} at {list(item.storage_offsets)}",
            path,
        )
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise ValueError(
            f"{name}: the planner returned a tensor of shape {list(target.size())}, not {list(item.lengths)}"
        )
    return Request(item, stored, target)


def groups(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Split requests into groups so that the buffers of each stay within MAX_BUFFERED_BYTES."""
    group: list[Request] = []
    held = 0
    for request in requests:
        more = 0 if request.direct else request.nbytes
        if group and held + more > MAX_BUFFERED_BYTES:
            yield group
            group, held = [], 0
        group.append(request)
        held += more
    if group:
        yield group


def settle_targets(requests: list[Request]) -> dict[DataFile, list[tuple[int, torch.Tensor]]]:
    """Return, for each file, ranges that do not overlap: their offsets, and memory to read them into.

    Requests for the same bytes share memory. Targets that share memory are not read into directly, but copied
    to in the order of the plan, so that the last one wins.
    """
    for request in overlapping(requests):
        request.direct = False
    targets: dict[DataFile, list[tuple[int, torch.Tensor]]] = {}
    by_file: dict[DataFile, list[tuple[int, int, Request]]] = {}
    for request in requests:
        if request.stored.file is not None:
            by_file.setdefault(request.stored.file, []).append((request.begin, request.end, request))
    for file, ranges in by_file.items():
        targets[file] = []
        for cluster in _clusters(ranges):
            begin = min(request.begin for request in cluster)
            end = max(request.end for request in cluster)
            only = cluster[0]
            if len(cluster) == 1 and only.direct and only.target is not None:
                targets[file].append((begin, bytes_of(only.target)))
                continue
            memory = _buffer(begin, end)
            targets[file].append((begin, memory))
            for request in cluster:
                request.direct = False
                request.memory = memory[request.begin - begin : request.end - begin]
    return targets


def overlapping(requests: Iterable[Request]) -> list[Request]:
    """Return the requests whose targets share memory with that of another one."""
    spans = [
        (*_span(request.target), request)
        for request in requests
        if request.target is not None and request.target.numel() and is_in_reach(request.target.device)
    ]
    return [request for cluster in _clusters(spans) if len(cluster) > 1 for request in cluster]


def _buffer(begin: int, end: int) -> torch.Tensor:
    """Return memory for bytes [begin, end) of a file, with the same alignment."""
    skip = begin % ALIGNMENT
    return torch.frombuffer(aligned_empty(skip + end - begin), dtype=torch.uint8)[skip:]


def _clusters(ranges: list[tuple[int, int, Request]]) -> Iterator[list[Request]]:
    """Yield groups of requests whose ranges overlap, directly or through others."""
    cluster: list[Request] = []
    reached = 0
    for begin, end, request in sorted(ranges, key=lambda entry: entry[:2]):
        if cluster and begin >= reached:
            yield cluster
            cluster = []
        reached = max(reached, end) if cluster else end
        cluster.append(request)
    if cluster:
        yield cluster


def _span(target: torch.Tensor) -> tuple[int, int]:
    """Return the range of addresses of a tensor's elements."""
    reach = sum((size - 1) * stride for size, stride in zip(target.size(), target.stride(), strict=True))
    begin = target.data_ptr()
    return begin, begin + (reach + 1) * target.itemsize


def _can_read_directly(target: torch.Tensor, stored: StoredItem) -> bool:
    return (
        type(target) is torch.Tensor
        and is_in_reach(target.device)
        and target.layout == torch.strided
        and target.dtype == DTYPES[stored.dtype or ""]
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _within(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    return len(shape) == len(offsets) == len(lengths) and all(
        min(offset, length) >= 0 and offset + length <= extent
        for extent, offset, length in zip(shape, offsets, lengths, strict=True)
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
