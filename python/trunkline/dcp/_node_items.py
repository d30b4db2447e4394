"""What each rank saves of a sharded state on the disks of its node: the items of torch's planner."""

import base64
import io
import math
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem, WriteItemType

from trunkline._errors import Format
from trunkline.checkpoint.directory.sharded import as_state, parts_in
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine, scatter
from trunkline.dcp._coverage import find_partly_saved
from trunkline.dcp._manifest import format_manifest, parse_manifest
from trunkline.dcp._shard_layout import plain_tensor
from trunkline.dcp._stored import DTYPES, DataFile, StoredItem


class Item(NamedTuple):
    """An item: a chunk of a tensor with its dtype and shape, or the bytes of an object."""

    fqn: str
    chunk: tuple[int, ...] | None  # where it begins in the tensor
    hint: int | None
    dtype: str | None
    shape: tuple[int, ...] | None

    @property
    def key(self) -> MetadataIndex:
        """What torch calls it."""
        return MetadataIndex(self.fqn, self.chunk, self.hint)

    @property
    def name(self) -> str:
        """What its bytes are called on the node; other items may have the same name."""
        is_part = self.chunk is not None and any(self.chunk)
        return f"{self.fqn}@{','.join(map(str, self.chunk or ()))}" if is_part else self.fqn

    @property
    def nbytes(self) -> int | None:
        """How many bytes a tensor has; None for an object, whose size only the checkpoint knows."""
        if self.dtype is None or self.shape is None:
            return None
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class RankItems(NamedTuple):
    """The items of this rank, tensors with their bytes, and on rank 0 the description of the whole state."""

    items: list[Item]
    tensors: list[torch.Tensor]
    metadata: str | None


def collect(
    exchange: Exchange | None, state: dict[str, Any], planner: SavePlanner | None, *, in_memory: bool
) -> RankItems:
    """Return what this rank saves, as the planner divides the state. Collective, in an exchange.

    in_memory: tensors on GPUs are copied to main memory.
    """
    is_first = exchange is None or exchange.rank == 0
    planner = DefaultSavePlanner() if planner is None else planner
    planner.set_up_planner(state, storage_meta=None, is_coordinator=is_first)
    metadata: list[str] = []

    def divide(plans: list[str]) -> list[str]:
        divided, about = planner.create_global_plan([unpacked(each) for each in plans])
        metadata.append(_described(about))
        return [packed(each) for each in divided]

    mine = scatter(exchange, "plans", packed(planner.create_local_plan()), divide)
    plan: SavePlan = planner.finish_plan(unpacked(mine))
    items: list[Item] = []
    tensors: list[torch.Tensor] = []
    for each in plan.items:
        item, tensor = _item_of(each, planner.resolve_data(each))
        items.append(item)
        tensors.append(tensor.cpu() if in_memory else tensor)
    # What one rank cannot save, such as an object that cannot be pickled, must fail on all: then they leave.
    combine(exchange, "collected", None, lambda _: None)
    return RankItems(items, tensors, metadata[0] if metadata else None)


def packed(value: SavePlan | LoadPlan | list[Any]) -> str:
    """Return a value as ranks send it to each other."""
    return base64.b85encode(zlib.compress(pickle.dumps(value), 1)).decode("ascii")


def unpacked(text: str) -> Any:
    """Return a value that another rank of the job has sent: ranks trust each other, as those of torch do."""
    return pickle.loads(zlib.decompress(base64.b85decode(text)))


def _described(metadata: Metadata) -> str:
    """Return what loads need to know of a state. Raises ValueError if ranks have only a part of a tensor."""
    found = find_partly_saved(metadata.state_dict_metadata)
    if found is not None:
        name, stored, wanted = found
        raise ValueError(
            f"{name!r}: the ranks that save have {stored} of its {wanted} elements; the ranks that have the "
            "others must save too (process_group)"
        )
    # The version is that of torch's Metadata, as torch's writers set it.
    about = replace(metadata, version="1.0.0", storage_data={}, storage_meta=None)
    return format_manifest(about).decode("ascii")


def _item_of(item: WriteItem, data: "torch.Tensor | io.BytesIO") -> tuple[Item, torch.Tensor]:
    """Return what an item is, and its bytes. Raises TypeError and Unsupported, which name it."""
    index = item.index
    chunk = None if index.offset is None else tuple(index.offset)
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"{index.fqn}: the planner must return a BytesIO, not {type(data).__name__}")
        contents = bytearray(data.getbuffer())
        memory = (
            torch.frombuffer(contents, dtype=torch.uint8) if contents else torch.empty(0, dtype=torch.uint8)
        )
        return Item(index.fqn, chunk, index.index, None, None), memory
    tensor = plain_tensor(index.fqn, data)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Item(index.fqn, chunk, index.index, dtype, tuple(tensor.shape)), tensor


def state_of(metadata: str, items: Sequence[Item]) -> dict[str, Any]:
    """Return what a checkpoint of these items has as its state. items: in the order of its tensors."""
    return as_state({"metadata": metadata, "items": [list(each) for each in items]})


def items_in(state: Any, where: str) -> list[Item]:
    """Return the items of a checkpoint, in the order of its tensors. Raises Format for another kind."""
    return [
        Item(fqn, _tuple(chunk), hint, dtype, _tuple(shape))
        for fqn, chunk, hint, dtype, shape in _parts_in(state, where)["items"]
    ]


def metadata_in(state: Any, where: str) -> Metadata:
    """Return what torch needs to know of a checkpoint, without items. Raises Format for another kind."""
    metadata = parse_manifest(_parts_in(state, where)["metadata"].encode("ascii"), where)
    metadata.storage_meta = StorageMeta()
    return metadata


def _parts_in(state: Any, where: str) -> Any:
    parts = parts_in(state)
    if parts is None:
        raise Format(
            None,
            f"{where} was saved with trunkline.Checkpointer, all of the state by each rank; load it with "
            "that",
        )
    return parts


def stored_items(
    items: Sequence[Item],
    nbytes: Sequence[int],
    places: Mapping[int, tuple[DataFile, int]],
    where: str,
) -> dict[MetadataIndex, StoredItem]:
    """Return what torch calls storage_data. nbytes: of each item; places: its file, and where it is there."""
    stored: dict[MetadataIndex, StoredItem] = {}
    for number, (item, size) in enumerate(zip(items, nbytes, strict=True)):
        if item.nbytes not in (None, size):
            raise Format(None, f"{where}: {item.name!r} has {size} bytes, which is not the size of its shape")
        file, offset = places.get(number, (None, 0))
        stored[item.key] = StoredItem(file, offset, size, item.dtype, item.shape)
    return stored


def _tuple(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
