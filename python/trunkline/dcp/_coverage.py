"""Checks whether chunks contain all elements of a tensor.

Torch's planners do not: they read the chunks that are stored, and leave the rest of a tensor unchanged.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, and sizes


def find_partly_saved(entries: Mapping[str, object]) -> tuple[str, int, int] | None:
    """Return an incomplete tensor: its name, the number of elements in its chunks, and its own number."""
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            wanted = math.prod(entry.size)
            stored = sum(math.prod(sizes) for _, sizes in _chunks_of(entry))
            if stored < wanted:
                return name, stored, wanted
    return None


def find_partly_loaded(
    planner: LoadPlanner, plan: LoadPlan, entries: Mapping[str, object]
) -> tuple[str, int, int] | None:
    """Return a tensor that a load on this rank would leave partly unchanged, since no chunk has the elements.

    Returns its name, how many of its elements are stored, and how many this rank has. Planners other than
    torch's own may omit elements on purpose: these are stored, or the shape differs from the stored one.
    """
    if not isinstance(planner, DefaultLoadPlanner):
        return None
    read: dict[MetadataIndex, set[Box]] = {}
    for item in plan.items:
        read.setdefault(item.dest_index, set()).add((tuple(item.dest_offsets), tuple(item.lengths)))
    for name, value in planner.state_dict.items():
        entry = entries.get(name)
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(value, torch.Tensor):
            continue
        if value.size() != entry.size:
            continue
        for offsets, sizes in _parts_of(value):
            wanted = math.prod(sizes)
            items = read.get(MetadataIndex(name, offsets), ())
            if sum(math.prod(lengths) for _, lengths in items) == wanted:
                continue
            missing = sum(math.prod(rest) for _, rest in _without([(offsets, sizes)], _chunks_of(entry)))
            if missing > 0:
                return name, wanted - missing, wanted
    return None


def _chunks_of(entry: TensorStorageMetadata) -> set[Box]:
    return {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}


def _parts_of(value: torch.Tensor) -> Iterator[Box]:
    """Yield the parts of a tensor that this rank has."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
    elif isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return
    elif hasattr(value, "__create_chunk_list__"):
        for chunk in value.__create_chunk_list__():
            yield tuple(chunk.offsets), tuple(chunk.sizes)
    else:
        yield (0,) * value.dim(), tuple(value.size())


def _without(boxes: list[Box], chunks: Iterable[Box]) -> list[Box]:
    """Return boxes, which must not overlap, without the elements of the chunks."""
    for chunk in chunks:
        boxes = [rest for box in boxes for rest in _cut(box, chunk)]
    return [box for box in boxes if math.prod(box[1]) > 0]


def _cut(box: Box, chunk: Box) -> Iterator[Box]:
    """Yield the parts of a box that are outside of a chunk."""
    begins, ends = list(box[0]), [offset + size for offset, size in zip(*box, strict=True)]
    cuts = [(offset, offset + size) for offset, size in zip(*chunk, strict=True)]
    if any(
        max(begin, cut_begin) >= min(end, cut_end)
        for begin, end, (cut_begin, cut_end) in zip(begins, ends, cuts, strict=True)
    ):
        yield box
        return
    for dim, (cut_begin, cut_end) in enumerate(cuts):
        for begin, end in ((begins[dim], cut_begin), (cut_end, ends[dim])):
            if begin < end:
                yield (
                    (*begins[:dim], begin, *begins[dim + 1 :]),
                    tuple(
                        (end if at == dim else ends[at]) - (begin if at == dim else begins[at])
                        for at in range(len(begins))
                    ),
                )
        begins[dim], ends[dim] = max(begins[dim], cut_begin), min(ends[dim], cut_end)
