"""One save of one rank whose state is sharded: each rank writes its items to the disks of its node.

The ranks talk to each other in this order; on each line, the message of the step as exchanges name it:

  1. in a separate exchange before the save (_node_items.py): each rank learns which items it saves, "plans",
     and that all ranks have theirs, "collected"
  2. in the exchange of the save (local_save.py): "entries", "volumes"
  3. all learn of the items of all, "items"; with copies: "memory for copies", the bytes of the copies over
     the process group, "copies"
  4. as other saves: "located", "written", "prepared", "marked"

Between two messages a rank may raise, which the others learn in the next one. Outside of an exchange, and
between operations of the process group, it must not: the others would wait until the timeout.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trunkline._core import GcPause
from trunkline._tensor_io.memory import empty_bytes
from trunkline._tensor_io.tensors import bytes_of, in_safetensors
from trunkline.checkpoint.directory import shards as shard_files
from trunkline.checkpoint.directory.local_save import LocalSave
from trunkline.checkpoint.directory.shares import Piece
from trunkline.checkpoint.nodes.copies import shares_kept_by
from trunkline.checkpoint.ranks.outcomes import NOT_SAVED, combine
from trunkline.dcp._node_items import Item, RankItems, packed, state_of, unpacked
from trunkline.dcp._shard_layout import spread_sizes
from trunkline.dcp._transfers import SLICE_BYTES, Batch, Transfer, Transport


class ShardedSave(LocalSave):
    """One save of one rank: of its items, and the copies that it keeps of those of others.

    The tensors are those of all ranks, in their order. Each is whole in one shard.
    """

    def __init__(self, group: Callable[[], Any], step: int, state: RankItems, *arguments: Any) -> None:
        """`group`: returns the process group of all ranks, which nothing else uses meanwhile."""
        super().__init__(step, state, *arguments)
        self._metadata = state.metadata
        self._group = group
        self._own = list(zip(self._described, state.items, strict=True))
        self._items: list[Item] = []  # of all ranks, as self._described
        self._items_of: list[list[int]] = []  # of each rank

    def _flatten(self, state: RankItems) -> tuple[Any, dict[str, torch.Tensor], list[str]]:
        names: dict[str, torch.Tensor] = {}
        for item, tensor in zip(state.items, state.tensors, strict=True):
            name = item.name
            while name in names:
                name += "~"
            names[name] = tensor if in_safetensors(tensor.dtype) else bytes_of(tensor)
        return {}, names, []

    @staticmethod
    def _shown_name(skeleton: Any, name: str) -> str:
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
                    self._lay_out_items(self._items_of[rank], place % len(own_ranks), max(1, volumes))
                self._owners += [owner] * (len(self._parts) - len(self._owners))

    def _learn_items(self) -> None:
        own = packed([(*about, *item) for about, item in self._own])
        everyone = map(unpacked, combine(self._exchange, "items", own, lambda of_ranks: of_ranks))
        tensors = dict(enumerate(self._tensors))
        self._described, self._items, self._items_of, self._tensors = [], [], [], []
        nothing = torch.empty(0)
        for rank, of_rank in enumerate(everyone):
            self._items_of.append([])
            for number, (name, dtype, shape, nbytes, *item) in enumerate(of_rank):
                self._described.append(shard_files.TensorRecord(name, dtype, shape, nbytes))
                self._items.append(Item(*item))
                if nbytes:
                    self._items_of[rank].append(len(self._items) - 1)
                self._tensors.append(tensors[number] if rank == self._context.ranks.rank else nothing)

    def _lay_out_items(self, items: Sequence[int], writer: int, volumes: int) -> None:
        sizes = [self._described[number].nbytes for number in items]
        for volume, part in enumerate(spread_sizes(sizes, volumes)):
            if part:
                self._add_shards([Piece(items[at], 0, sizes[at]) for at in part], writer, volume)

    def _get_copies(self) -> None:
        """Send the items of this rank to the nodes that keep copies, and get those that this rank writes."""
        context, exchange = self._context, self._exchange
        routes = self._routes()
        if exchange is None or not routes:
            return
        kept = [self._items_of[sender] for sender, _ in routes]
        nbytes = [sum(self._described[number].nbytes for number in items) for items in kept]
        own = context.ranks.rank
        memory = [
            empty_bytes(size) if receiver == own else None
            for size, (_, receiver) in zip(nbytes, routes, strict=True)
        ]
        stream = _Stream([self._tensors[number] for number in self._items_of[own]])
        slices = [
            _Slice(route, begin, min(begin + SLICE_BYTES, size))
            for route, size in enumerate(nbytes)
            for begin in range(0, size, SLICE_BYTES)
        ]

        def memory_for(number: int) -> torch.Tensor:
            arriving = memory[slices[number].route]
            assert arriving is not None  # this rank is the receiver
            return arriving[slices[number].begin : slices[number].end]

        def read(numbers: list[int]) -> Batch:
            return Batch({each: stream.read(slices[each].begin, slices[each].end) for each in numbers}, {})

        # A rank without the memory for copies has raised; the others must not wait for it in the group.
        combine(exchange, "memory for copies", None, lambda _: None)
        Transport(context, exchange, self._group).run_transfers(
            "copies",
            [Transfer(*routes[route], end - begin) for route, begin, end in slices],
            read,
            memory_for,
            lambda number, arrived: None,
            NOT_SAVED,
        )
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
        return {**super()._describe_whole(reports), "state": state_of(self._metadata, self._items)}


class _Slice(NamedTuple):
    """Bytes of what one rank sends to another one."""

    route: int
    begin: int
    end: int


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
