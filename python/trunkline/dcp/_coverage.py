"""Whether chunks hold all elements of a tensor.

Torch's planners do not ask: they read what is stored, and leave the rest of a tensor as it was.
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
    """Return a tensor whose chunks together are too small for it: its name, their elements, and its own."""
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
    """Return a tensor of which a load on this rank would leave elements as they are, since no chunk has them.

    Its name, how many elements of it are stored, and how many this rank has. What other planners than
    torch's own leave out on purpose is stored, or not of the shape that is stored.
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
    """What this rank has of a tensor."""
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
    """What is left of boxes that do not overlap."""
    for chunk in chunks:
        boxes = [rest for box in boxes for rest in _cut(box, chunk)]
    return [box for box in boxes if math.prod(box[1]) > 0]


def _cut(box: Box, chunk: Box) -> Iterator[Box]:
    """Parts of a box that are outside of a chunk."""
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
