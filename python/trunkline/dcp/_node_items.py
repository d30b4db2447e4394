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
from trunkline.checkpoint.directory.local_load import DCP
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine
from trunkline.dcp._coverage import find_partly_saved
from trunkline.dcp._manifest import format_manifest, parse_manifest
from trunkline.dcp._shard_layout import plain_tensor
from trunkline.dcp._stored import DTYPES, StoredItem

_METADATA, _ITEMS = "dcp_metadata", "dcp_items"  # the keys that it has besides


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
        """The bytes of a tensor; None for an object, whose bytes say nothing of it."""
        if self.dtype is None or self.shape is None:
            return None
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class Collected(NamedTuple):
    """The items of this rank, tensors with their bytes, and on rank 0 the description of the whole state."""

    items: list[Item]
    tensors: list[torch.Tensor]
    metadata: str | None


def collect(
    exchange: Exchange | None, state: dict[str, Any], planner: SavePlanner | None, *, in_memory: bool
) -> Collected:
    """Return what this rank saves, as the planner divides the state. Collective, in an exchange.

    in_memory: tensors on GPUs are copied to main memory.
    """
    is_first = exchange is None or exchange.rank == 0
    planner = DefaultSavePlanner() if planner is None else planner
    planner.set_up_planner(state, storage_meta=None, is_coordinator=is_first)
    metadata: list[Metadata] = []

    def divide(plans: list[str]) -> list[str]:
        divided, about = planner.create_global_plan([unpacked(each) for each in plans])
        metadata.append(about)
        return [packed(each) for each in divided]

    plans = combine(exchange, "plans", packed(planner.create_local_plan()), divide)
    plan: SavePlan = planner.finish_plan(unpacked(plans[0 if exchange is None else exchange.rank]))
    items: list[Item] = []
    tensors: list[torch.Tensor] = []
    for each in plan.items:
        item, tensor = _item_of(each, planner.resolve_data(each))
        items.append(item)
        tensors.append(tensor.cpu() if in_memory else tensor)
    return Collected(items, tensors, _described(metadata[0]) if metadata else None)


def packed(plan: SavePlan | LoadPlan) -> str:
    """Return a plan as ranks send it to each other."""
    return base64.b85encode(zlib.compress(pickle.dumps(plan), 1)).decode("ascii")


def unpacked(text: str) -> Any:
    """Return a plan that another rank of the job has sent: ranks trust each other, as those of torch do."""
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


def description_of(metadata: str, items: Sequence[Item]) -> dict[str, Any]:
    """Return what the description of a save has of its items, in the order of its tensors."""
    return {_METADATA: metadata, _ITEMS: [list(each) for each in items]}


def metadata_in(whole: Mapping[str, Any], where: str) -> Metadata:
    """Return what torch needs to know of a save. storage_data: its items, which are in no file yet.

    Raises Format for a save of another kind, or a newer version.
    """
    if DCP not in whole["features"]:
        raise Format(
            None,
            f"{where} was saved with trunkline.Checkpointer(..., local=True), all of the state by each rank; "
            "load it with that",
        )
    unknown = set(whole["features"]) - {DCP}
    if unknown:
        raise Format(None, f"{where} needs {', '.join(sorted(unknown))}; use a newer trunkline")
    metadata = parse_manifest(whole[_METADATA].encode("ascii"), where)
    stored: dict[MetadataIndex, StoredItem] = {}
    for item, (_, _, _, nbytes) in zip(items_in(whole), whole["tensors"], strict=True):
        if item.nbytes not in (None, nbytes):
            raise Format(
                None, f"{where}: {item.name!r} has {nbytes} bytes, which is not the size of its shape"
            )
        stored[item.key] = StoredItem(None, 0, nbytes, item.dtype, item.shape)
    metadata.storage_data = stored
    metadata.storage_meta = StorageMeta()
    return metadata


def items_in(whole: Mapping[str, Any]) -> list[Item]:
    """Return the items of a save, in the order of its tensors."""
    return [
        Item(
            fqn, None if chunk is None else tuple(chunk), hint, dtype, None if shape is None else tuple(shape)
        )
        for fqn, chunk, hint, dtype, shape in whole[_ITEMS]
    ]
