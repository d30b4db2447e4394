"""One save of one rank whose state is sharded: each rank writes its items to the disks of its node.

Copies are sent to the nodes that keep them, over the process group, before anything is written.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trunkline._core import CheckpointSave, GcPause
from trunkline._tensor_io.memory import empty_bytes
from trunkline._tensor_io.tensors import bytes_of
from trunkline.checkpoint.directory import shards as shard_files
from trunkline.checkpoint.directory.local_load import DCP
from trunkline.checkpoint.directory.local_save import LocalSave
from trunkline.checkpoint.directory.shares import Piece
from trunkline.checkpoint.nodes.copies import shares_kept_by
from trunkline.checkpoint.ranks.outcomes import combine
from trunkline.dcp._node_items import Collected, Item, description_of
from trunkline.dcp._parcels import Parcel, reading_ranks, send_all

_SLICE_BYTES = 16 << 20  # of copies that are sent at a time


class ShardedSave(LocalSave):
    """One save of one rank: of its items, and the copies that it keeps of those of others.

    The tensors are those of all ranks, in their order. Each is whole in one shard.
    """

    def __init__(self, collected: Collected, group: Callable[[], Any], *arguments: Any) -> None:
        """`group`: returns the process group of all ranks, which nothing else uses meanwhile."""
        self._own_items = collected.items
        self._own_tensors = collected.tensors
        self._metadata = collected.metadata
        self._group = group
        self._save: CheckpointSave | None = None
        super().__init__(*arguments)
        self._own_tensors = []  # so that they are freed as soon as they are staged
        self._own = list(zip(self._described, collected.items, strict=True))
        self._items: list[Item] = []  # of all ranks, as self._described
        self._writers: list[int] = []  # of each, the rank that has it

    def _flatten(self, state: Any) -> tuple[Any, dict[str, torch.Tensor], list[str]]:
        names: dict[str, torch.Tensor] = {}
        for item, tensor in zip(self._own_items, self._own_tensors, strict=True):
            name = item.name
            while name in names:
                name += "~"
            names[name] = tensor
        return {}, names, [DCP]

    @staticmethod
    def _place_of(skeleton: Any, name: str) -> str:
        return repr(name)

    def _digest(self) -> dict[str, str]:
        """Return what must be the same on all ranks: not the items, which differ."""
        return {what: digest for what, digest in super()._digest().items() if what in ("step", "writers")}

    def _lay_out(self, volumes: int) -> None:
        """Learn of all items, get the copies that this node keeps, and divide its items among the volumes."""
        self._learn_items()
        self._get_copies()
        context = self._context
        own_ranks = context.nodes.ranks_of(context.own_node)
        self._parts, self._writer_and_volume, self._owners, self._costs = [], [], [], []
        with GcPause():
            for owner in shares_kept_by(context.own_node, self._entry):
                for place, rank in enumerate(context.nodes.ranks_of(owner)):
                    self._lay_out_items(self._items_of(rank), place % len(own_ranks), max(1, volumes))
                self._owners += [owner] * (len(self._parts) - len(self._owners))

    def _learn_items(self) -> None:
        own = [[*about, *item] for about, item in self._own]
        everyone = combine(self._exchange, "items", own, lambda of_ranks: of_ranks)
        tensors = dict(enumerate(self._tensors))
        self._described, self._items, self._writers, self._tensors = [], [], [], []
        nothing = torch.empty(0)
        for rank, of_rank in enumerate(everyone):
            for number, (name, dtype, shape, nbytes, *item) in enumerate(of_rank):
                self._described.append(shard_files.TensorRecord(name, dtype, tuple(shape), nbytes))
                fqn, chunk, hint, torch_dtype, extents = item
                self._items.append(Item(fqn, _tuple(chunk), hint, torch_dtype, _tuple(extents)))
                self._writers.append(rank)
                self._tensors.append(tensors[number] if rank == self._context.ranks.rank else nothing)

    def _items_of(self, rank: int) -> list[int]:
        return [
            number
            for number, writer in enumerate(self._writers)
            if writer == rank and self._described[number].nbytes > 0
        ]

    def _lay_out_items(self, items: Sequence[int], writer: int, volumes: int) -> None:
        """Spread items over the volumes: the largest first, each to where there are the fewest bytes."""
        used = [0] * volumes
        parts: list[list[int]] = [[] for _ in range(volumes)]
        for number in sorted(items, key=lambda number: -self._described[number].nbytes):
            volume = used.index(min(used))
            parts[volume].append(number)
            used[volume] += self._described[number].nbytes
        for volume, part in enumerate(parts):
            if part:
                pieces = [Piece(number, 0, self._described[number].nbytes) for number in sorted(part)]
                self._add_shards(pieces, writer, volume)

    def _get_copies(self) -> None:
        """Send the items of this rank to the nodes that keep copies, and get those that this rank writes."""
        context, exchange = self._context, self._exchange
        routes = self._routes()
        if exchange is None or not routes:
            return
        kept = [self._items_of(sender) for sender, _ in routes]
        nbytes = [sum(self._described[number].nbytes for number in items) for items in kept]
        own = context.ranks.rank
        memory = [
            empty_bytes(size) if receiver == own else None
            for size, (_, receiver) in zip(nbytes, routes, strict=True)
        ]
        stream = _Stream([self._tensors[number] for number in self._items_of(own)])
        slices = [
            (route, begin, min(begin + _SLICE_BYTES, size))
            for route, size in enumerate(nbytes)
            for begin in range(0, size, _SLICE_BYTES)
        ]
        # A rank without the memory for copies has raised; the others must not wait for it in the group.
        combine(exchange, "memory for copies", None, lambda _: None)
        ranks = reading_ranks(context, self._group)
        try:
            send_all(
                ranks,
                [Parcel(*routes[route], end - begin) for route, begin, end in slices],
                lambda number: stream.read(*slices[number][1:]),
                lambda number: memory[slices[number][0]][slices[number][1] : slices[number][2]],  # type: ignore[index]
                lambda number, arrived: None,
            )
        finally:
            ranks.close()
        for items, arrived in zip(kept, memory, strict=True):
            if arrived is not None:
                self._use_copies(items, arrived)

    def _routes(self) -> list[tuple[int, int]]:
        """Return which ranks send their items to which, the same on all ranks."""
        nodes = self._context.nodes
        routes = []
        for keeper in range(nodes.count):
            keepers = nodes.ranks_of(keeper)
            for owner in shares_kept_by(keeper, self._entry):
                if owner != keeper:
                    routes += [
                        (rank, keepers[place % len(keepers)])
                        for place, rank in enumerate(nodes.ranks_of(owner))
                    ]
        return routes

    def _use_copies(self, items: Sequence[int], arrived: torch.Tensor) -> None:
        begin = 0
        for number in items:
            end = begin + self._described[number].nbytes
            self._tensors[number] = arrived[begin:end]
            begin = end

    def _describe_whole(self, reports: list[list[dict[str, Any]]]) -> dict[str, Any]:
        assert self._metadata is not None  # on rank 0
        return {**super()._describe_whole(reports), **description_of(self._metadata, self._items)}


class _Stream:
    """The bytes of tensors, one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._memory = [bytes_of(tensor) for tensor in tensors]
        self._ends: list[int] = []
        for memory in self._memory:
            self._ends.append((self._ends[-1] if self._ends else 0) + memory.numel())

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return bytes of the stream."""
        parts = []
        for memory, last in zip(self._memory, self._ends, strict=True):
            first = last - memory.numel()
            if first < end and begin < last:
                parts.append(memory[max(0, begin - first) : end - first])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tuple(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
