"""Finds tensors that share memory, and describes tensors as views of that memory.

Everything here is about elements, not about storages: two tensors share memory if they have a byte in common.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from trunkline._tensor_io.tensors import in_safetensors
from trunkline._torch_or_numpy import torch

# Limit for the contiguous pieces of one tensor's memory. Each needs 16 bytes during the analysis, and a
# separate copy while the tensor is saved or loaded.
MAX_RUNS = 1 << 20

Runs: TypeAlias = "numpy.ndarray[Any, numpy.dtype[numpy.int64]]"  # rows of begin and end in bytes, ascending


class TooManyRuns(Exception):
    """The memory of a tensor consists of more than MAX_RUNS pieces."""


class Strided(NamedTuple):
    """A tensor as a view of memory: shape and strides in elements, offset in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    offset: int

    def end(self) -> int:
        """Return the end of its last byte; its offset if it has no elements."""
        if 0 in self.shape:
            return self.offset
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * self.itemsize

    def runs(self) -> Runs:
        """Return its bytes as runs that do not touch. Raises TooManyRuns."""
        runs = numpy.array([[self.offset, self.offset + self.itemsize]], numpy.int64)
        if 0 in self.shape:
            return runs[:0]
        dims = sorted((step, n) for n, step in zip(self.shape, self.stride, strict=True) if n > 1 and step)
        for step, n in dims:
            if len(runs) == 1 and runs[0, 1] - runs[0, 0] >= step * self.itemsize:
                runs[0, 1] += (n - 1) * step * self.itemsize  # without gaps
                continue
            if len(runs) * n > MAX_RUNS:
                raise TooManyRuns
            steps = numpy.arange(n, dtype=numpy.int64)[:, None, None] * (step * self.itemsize)
            runs = merged((runs[None] + steps).reshape(-1, 2))
        return runs

    def is_dense(self) -> bool:
        """Whether it uses each byte from its offset to its end exactly once."""
        expected = 1
        for step, n in sorted((step, n) for n, step in zip(self.shape, self.stride, strict=True) if n != 1):
            if step != expected:
                return False
            expected *= n
        return True


def strided(tensor: torch.Tensor) -> Strided:
    """Return a tensor as a view of all memory; its offset is its address."""
    return Strided(tuple(tensor.shape), tensor.stride(), tensor.itemsize, tensor.data_ptr())


def significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return its strides, with 0 for extents of 1, whose strides have no meaning."""
    return tuple(
        0 if extent == 1 else stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def spans(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return the addresses at which each (strided) tensor begins and ends."""
    begins = [tensor.data_ptr() for tensor in tensors]
    ends = [
        begin + tensor.nbytes if tensor.is_contiguous() else strided(tensor).end()
        for begin, tensor in zip(begins, tensors, strict=True)
    ]
    return begins, ends


def merged(runs: Runs) -> Runs:
    """Join runs, in any order, that touch or overlap."""
    if len(runs) < 2:
        return runs
    runs = runs[numpy.argsort(runs[:, 0], kind="stable")]
    ends = numpy.maximum.accumulate(runs[:, 1])
    first = numpy.concatenate(([True], runs[1:, 0] > ends[:-1]))
    last = numpy.concatenate((first[1:], [True]))
    return numpy.stack((runs[first, 0], ends[last]), axis=1)


def groups(begins: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """Return groups of indices of spans that overlap, directly or through others; no groups of one."""
    if len(begins) < 2:
        return []
    begin, end = numpy.array(begins, numpy.int64), numpy.array(ends, numpy.int64)
    order = numpy.argsort(begin, kind="stable")
    reached = numpy.maximum.accumulate(end[order])
    joined = numpy.flatnonzero(begin[order][1:] < reached[:-1])  # each with the one after it
    found: list[list[int]] = []
    last = -2
    for at in joined.tolist():
        if at != last + 1:
            found.append([int(order[at])])
        found[-1].append(int(order[at + 1]))
        last = at
    return found


def sharing(
    views: Sequence[Strided] | Mapping[int, Strided], among: Sequence[int]
) -> list[tuple[list[int], Runs]]:
    """Divide the views of `among` (indices) into groups of those that have bytes in common.

    Returns each group with all its runs; views that share nothing are groups of one. A view of more than
    MAX_RUNS pieces counts as sharing nothing, and has no runs.
    """
    found: list[tuple[list[int], Runs]] = []
    runs: list[Any] = []
    owners: list[int] = []
    for index in sorted(among):  # so that the outcome does not depend on addresses
        view = views[index]
        try:
            runs.append(((view.offset, view.end()),) if view.is_dense() else view.runs())
            owners.append(index)
        except TooManyRuns:
            found.append(([index], numpy.empty((0, 2), numpy.int64)))
    if not runs:
        return found
    flat = numpy.concatenate(runs)
    owner = numpy.repeat(numpy.arange(len(runs)), [len(each) for each in runs])
    order = numpy.argsort(flat[:, 0], kind="stable")
    flat, owner = flat[order], owner[order]
    overlaps = flat[1:, 0] < numpy.maximum.accumulate(flat[:, 1])[:-1]
    parent = list(range(len(runs)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    for a, b in numpy.unique(numpy.stack((owner[:-1], owner[1:]), axis=1)[overlaps], axis=0).tolist():
        parent[root(a)] = root(b)
    members: dict[int, list[int]] = {}
    for index in range(len(runs)):
        members.setdefault(root(index), []).append(index)
    for group in members.values():
        of_all = merged(numpy.concatenate([runs[index] for index in group]))
        found.append(([owners[index] for index in group], of_all))
    return found


class Shared(NamedTuple):
    """Memory that several tensors share, or one tensor whose elements overlap."""

    members: list[int]  # indices of tensors
    offsets: list[int]  # of each in the memory, in bytes
    memory_bytes: int  # from the first byte of any member (or a little before) to the last
    whole: int | None  # the member that is all of it, in C order
    stored: torch.Tensor | None  # else: the bytes of all members without gaps, flat


def find_shared(tensors: Sequence[torch.Tensor]) -> list[Shared]:
    """Return the memory that `tensors` share; they must be strided, not empty, and no two the same view.

    Omits tensors with too many pieces, and memory on a GPU that no single tensor covers: these are stored
    separately.
    """
    begins, ends = spans(tensors)
    others = {index for index, tensor in enumerate(tensors) if not tensor.is_contiguous()}
    found: list[Shared] = []
    grouped = groups(begins, ends)
    in_groups = {index for group in grouped for index in group}
    views = {index: strided(tensors[index]) for index in others | in_groups}
    grouped += [[index] for index in sorted(others - in_groups) if not views[index].is_dense()]
    for group in grouped:
        for members, runs in sharing(views, group):
            if not len(runs) or (len(members) == 1 and not _repeats(views[members[0]], runs)):
                continue
            shared = _shared(tensors, views, members, runs)
            if shared is not None:
                found.append(shared)
    return found


def _repeats(view: Strided, runs: Runs) -> bool:
    """Whether elements of the view overlap."""
    count = view.itemsize
    for extent in view.shape:
        count *= extent
    return bool((runs[:, 1] - runs[:, 0]).sum() < count)


def _shared(
    tensors: Sequence[torch.Tensor], views: Mapping[int, Strided], members: list[int], runs: Runs
) -> Shared | None:
    begin, end = int(runs[0, 0]), int(runs[-1, 1])
    # Every offset must be a multiple of the element size, as torch requires, wherever the memory is.
    padding = next(
        (
            before
            for before in range(16)
            if all((views[i].offset - begin + before) % views[i].itemsize == 0 for i in members)
        ),
        None,
    )
    if padding is None:
        return None
    offsets = [views[i].offset - begin + padding for i in members]
    if len(runs) == 1 and not padding:
        for index in members:
            if tensors[index].is_contiguous() and tensors[index].nbytes == end - begin:
                return Shared(members, offsets, end - begin, index, None)
    span = _span([tensors[i] for i in members], begin, end)
    if span is None:
        return None
    dtypes = {tensors[i].dtype for i in members}
    # In the members' dtype if they have the same one, for other readers of the shard.
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    if not in_safetensors(dtype):
        dtype = torch.uint8
    stored = gather(span, runs - begin).view(dtype)
    return Shared(members, offsets, end - begin + padding, None, stored)


def _span(members: Sequence[torch.Tensor], begin: int, end: int) -> torch.Tensor | None:
    """Return the memory from `begin` to `end`, of which only the bytes of members may be accessed."""
    for tensor in members:
        storage = tensor.untyped_storage()
        first = storage.data_ptr()
        if first <= begin and end <= first + storage.nbytes():
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return empty.set_(storage, begin - first, (end - begin,), (1,))
    if any(tensor.device.type != "cpu" for tensor in members):
        return None
    return _numpy_span(members, begin, end)


class _Address:
    """Describes memory to numpy, and keeps its owners alive."""

    def __init__(self, owners: Sequence[torch.Tensor], begin: int, end: int) -> None:
        self.owners = owners
        self.__array_interface__ = {
            "version": 3,
            "shape": (end - begin,),
            "typestr": "|u1",
            "data": (begin, False),
        }


def _numpy_span(members: Sequence[torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Return the memory of arrays of numpy, which torch sees as separate storages even if they overlap."""
    return torch.from_numpy(numpy.asarray(_Address(members, begin, end)))


def gather(span: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Return the bytes of the runs, one after the other; a view of `span` if there is only one run."""
    if len(runs) == 1:
        return span[int(runs[0, 0]) : int(runs[0, 1])]
    return torch.cat([span[begin:end] for begin, end in runs.tolist()])


def scatter(stored: torch.Tensor, runs: Runs, memory: torch.Tensor) -> torch.Tensor:
    """Copy the bytes of the runs, which are one after the other in `stored`, to their places in `memory`."""
    at = 0
    for begin, end in runs.tolist():
        memory[begin:end] = stored[at : at + end - begin]
        at += end - begin
    return memory


def view_of(memory: torch.Tensor, view: Strided, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that is this view of `memory`, flat bytes."""
    flat = memory[view.offset : view.end()].view(dtype)
    return flat.as_strided(view.shape, view.stride)
