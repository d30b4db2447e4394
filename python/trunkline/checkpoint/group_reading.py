"""Reads safetensors files once for all ranks of a process group: each reads a part, and the others get it.

Ranks on one machine share memory; what another machine has read comes over the group, once for a machine.

The files' bytes are divided into pieces, which the ranks read in turn. In each round

  1. every rank waits for its piece of the round, which it has read into memory that ranks share;
  2. all ranks learn whether every rank has its piece; if one has not, all raise;
  3. pieces are sent to the machines that do not have them, and all ranks learn when they are there;
  4. every rank copies all pieces of the round into its own tensors, and meanwhile reads its pieces to come.

In step 2 of a round all ranks have copied the pieces of the rounds before: their memory can be reused.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from trunkline._core import Future, crc32c
from trunkline._errors import RankError
from trunkline._formats.safetensors import Header
from trunkline._formats.safetensors.loader import (
    check_unchanged,
    checksums_of,
    corrupt_chunk,
    empty_tensor,
)
from trunkline._formats.safetensors.pieces import Piece, cut
from trunkline._formats.safetensors.read_ahead import OpenFiles, ReadOptions
from trunkline._tensor_io.background import start_thread
from trunkline.checkpoint.ranks.gloo_group import new_gloo_group
from trunkline.checkpoint.ranks.node_memory import NodeMemory
from trunkline.checkpoint.ranks.presence import await_ranks
from trunkline.checkpoint.ranks.store import rank_error

_SLOTS = 3  # pieces of a rank in shared memory: one is copied, two are being read
_MIN_PIECE_BYTES = 1 << 20  # divides pieces; what checksums cover
_MAX_PIECE_BYTES = 64 << 20
_MAX_GAP_BYTES = 64 << 10  # between tensors, read rather than left out


@dataclass
class _OwnGroup:
    """A process group of the ranks of another one, for one read at a time."""

    group: Any
    is_idle: bool = False  # on this rank


# By the group that programs pass. They are kept until destroy_process_group(): torch cannot make another
# group of the same ranks after one was destroyed.
_own_groups: "WeakKeyDictionary[Any, list[_OwnGroup]]" = WeakKeyDictionary()


def _take_own_group(given: Any, size: int) -> _OwnGroup:
    """Return a group that is idle on all ranks, or a new one: not the given one, which the program uses."""
    own_groups: list[_OwnGroup] = _own_groups.setdefault(given, [])
    idle: list[Any] = [None] * size
    dist.all_gather_object(idle, [index for index, own in enumerate(own_groups) if own.is_idle], group=given)
    found = min(set.intersection(*map(set, idle)), default=None)
    if found is None:
        own_groups.append(_OwnGroup(new_gloo_group(given)))
        return own_groups[-1]
    own: _OwnGroup = own_groups[found]
    own.is_idle = False
    return own


class ReadingRanks:
    """The ranks that read together. Making one is a collective operation of the given group."""

    def __init__(self, given: Any) -> None:
        """`given`: the process group. Raises TypeError and ValueError for what is none of this process."""
        if given is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(given, dist.ProcessGroup):
            raise TypeError(
                "group: must be a torch.distributed.ProcessGroup of which this process is a rank, such as "
                f"torch.distributed.group.WORLD, not {given!r}"
            )
        self.rank, self.size = dist.get_rank(given), dist.get_world_size(given)
        if self.rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        self._is_in_step = True  # no operation of the group has failed
        self._own: _OwnGroup | None = None
        if self.size > 1:
            await_ranks(given, "the call that reads files together")
            self._own = _take_own_group(given, self.size)

    @property
    def _group(self) -> Any:
        assert self._own is not None  # there are other ranks
        return self._own.group

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises RankError if one does not come."""
        values: list[Any] = [None] * self.size
        if self.size == 1:
            return [value]
        with self._explained():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def transfer(
        self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]
    ) -> None:
        """Send and receive memory, each to or from a rank."""
        with self._explained():
            works = [
                dist.isend(memory, dist.get_global_rank(self._group, rank), group=self._group)
                for memory, rank in sends
            ]
            works += [
                dist.irecv(memory, dist.get_global_rank(self._group, rank), group=self._group)
                for memory, rank in receives
            ]
            for work in works:
                assert work is not None  # this process is a rank of the group
                work.wait()

    def close(self) -> None:
        """Let later reads use the group, unless the ranks are no longer at the same operation of it."""
        if self._own is not None:
            self._own.is_idle = self._is_in_step

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self._is_in_step = False
            raise RankError(
                None,
                f"rank {self.rank} reads files together with the other ranks, and one has ended, or does not "
                f"read them; all ranks of the group must make the same call: {error}",
            ) from error


def tensors_of_group(
    ranks: ReadingRanks, opened: OpenFiles, memory_bytes: int, options: ReadOptions
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of all files on every rank; the ranks must have opened the same.

    Raises what tensors_in_order() raises where this rank reads, and RankError if another rank fails, or has
    ended its loop early. Closes `ranks` and the files when it ends.
    """
    return _GroupTensors(_Reading(ranks, opened, memory_bytes, options))


class _GroupTensors:
    """An iterator whose reading begins when it is made, since other ranks wait for this one."""

    def __init__(self, reading: "_Reading") -> None:
        self._reading = reading
        self._results = reading.results()
        start_thread(reading.run)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._results)

    def close(self) -> None:
        """End early."""
        self._results.close()  # type: ignore[attr-defined]
        self._reading.stop()

    def __del__(self) -> None:
        self._reading.stop()


class _Reading:
    """Reads in a thread, which talks to the other ranks."""

    def __init__(
        self, ranks: ReadingRanks, opened: OpenFiles, memory_bytes: int, options: ReadOptions
    ) -> None:
        self._ranks = ranks
        self._opened = opened
        self._options = options
        self._sums = [checksums_of(header, options.verify) for header in opened.headers]
        piece_bytes = memory_bytes // (2 * _SLOTS) // _MIN_PIECE_BYTES * _MIN_PIECE_BYTES
        piece_bytes = min(max(piece_bytes, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        grains = [1 if sums is None else sums.chunk_bytes for sums in self._sums]
        self._pieces = cut(opened.headers, piece_bytes, _MAX_GAP_BYTES, grains)
        self._slot_bytes = -(-max((each.nbytes for each in self._pieces), default=1) // 4096) * 4096
        self._tensors = _Tensors(opened.headers, options.device)
        self._results = _Results(max(1, memory_bytes - _SLOTS * self._slot_bytes))
        self._reads: dict[int, Future] = {}  # by round

    def results(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._results.take()

    def stop(self) -> None:
        """Let the thread end: at its next meeting with the other ranks."""
        self._results.close()

    def run(self) -> None:
        """The thread."""
        error: BaseException | None = None
        try:
            with self._opened.until_read:
                try:
                    self._run_rounds()
                finally:
                    for future in self._reads.values():
                        with suppress(Exception):
                            future.result()  # the memory is in use until then
        except BaseException as failed:
            error = failed
        finally:
            self._ranks.close()
            self._results.end(error)

    def _run_rounds(self) -> None:
        nodes, memory = self._share_memory()
        try:
            for name, tensor in self._tensors.finished():
                self._results.put(name, tensor)
            self._start_read(memory, 0)
            self._start_read(memory, 1)
            for number in range(-(-len(self._pieces) // self._ranks.size)):
                self._agree(self._finish_read(memory, number))
                self._exchange(nodes, memory, number)
                self._start_read(memory, number + 2)
                for rank in range(self._ranks.size):
                    piece = self._piece(number, rank)
                    if piece is not None:
                        self._tensors.fill(piece, self._view(nodes, memory, number, rank, piece))
                        for name, tensor in self._tensors.finished():
                            self._results.put(name, tensor)
        finally:
            memory.close()

    def _share_memory(self) -> tuple["_Nodes", NodeMemory]:
        """Allocate this rank's memory, and map that of the ranks on this machine."""
        # What other machines have read is received into slots after this rank's own; it may receive all.
        own = self._slot_bytes * _SLOTS
        memory = NodeMemory(own, own + self._slot_bytes * self._ranks.size)
        addresses = self._ranks.gather(memory.address())
        reached = {
            rank
            for rank, address in enumerate(addresses)
            if rank != self._ranks.rank and memory.open(rank, address)
        }
        # One that only one of both can read counts as another machine.
        everyone = self._ranks.gather(reached)
        return _Nodes.of(everyone), memory

    def _piece(self, number: int, rank: int) -> Piece | None:
        index = number * self._ranks.size + rank
        return self._pieces[index] if index < len(self._pieces) else None

    def _own_slot(self, number: int, piece: Piece) -> slice:
        begin = number % _SLOTS * self._slot_bytes
        return slice(begin, begin + piece.nbytes)

    def _received_slot(self, rank: int, piece: Piece) -> slice:
        begin = (_SLOTS + rank) * self._slot_bytes
        return slice(begin, begin + piece.nbytes)

    def _start_read(self, memory: NodeMemory, number: int) -> None:
        piece = self._piece(number, self._ranks.rank)
        if piece is not None:
            into = memory.own[self._own_slot(number, piece)]
            self._reads[number] = self._opened.files[piece.file].async_pread(into, piece.begin)

    def _finish_read(self, memory: NodeMemory, number: int) -> Exception | None:
        """Wait for this rank's piece of a round, and verify it. Returns the error, if there is one."""
        piece = self._piece(number, self._ranks.rank)
        if piece is None:
            return None
        try:
            self._reads.pop(number).result()
            self._verify(piece, memory.own[self._own_slot(number, piece)])
        except Exception as error:
            return error
        return None

    def _verify(self, piece: Piece, contents: torch.Tensor) -> None:
        sums = self._sums[piece.file]
        header = self._opened.headers[piece.file]
        if sums is None:
            check_unchanged(header)
            return
        first = (piece.begin - len(header.head)) // sums.chunk_bytes
        for chunk, begin in enumerate(range(0, piece.nbytes, sums.chunk_bytes), first):
            if crc32c(contents[begin : begin + sums.chunk_bytes]) != sums.values[chunk]:
                raise corrupt_chunk(header, sums, chunk)

    def _agree(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error."""
        why = None if error is None else str(error) or type(error).__name__
        if error is None and self._results.is_closed():
            why = "its loop over the tensors has ended early"
        for rank, text in enumerate(self._ranks.gather(why)):
            if text is not None:
                if error is not None:
                    raise error
                raise rank_error(
                    rank, f"rank {rank} failed, which reads files with rank {self._ranks.rank}: {text}"
                )

    def _exchange(self, nodes: "_Nodes", memory: NodeMemory, number: int) -> None:
        """Let every machine have the pieces of a round."""
        if nodes.count == 1:
            return
        sends, receives = [], []
        for rank in range(self._ranks.size):
            piece = self._piece(number, rank)
            if piece is None:
                continue
            for receiver in nodes.receivers(rank):
                if rank == self._ranks.rank:
                    sends.append((memory.own[self._own_slot(number, piece)], receiver))
                if receiver == self._ranks.rank:
                    receives.append((memory.own[self._received_slot(rank, piece)], rank))
        self._ranks.transfer(sends, receives)
        self._ranks.gather(None)

    def _view(
        self, nodes: "_Nodes", memory: NodeMemory, number: int, rank: int, piece: Piece
    ) -> torch.Tensor:
        """Return a piece of a round that `rank` has read, in the memory of this machine."""
        holder = nodes.holder(rank, self._ranks.rank)
        where = memory.own if holder == self._ranks.rank else memory.of(holder)
        return where[self._own_slot(number, piece) if holder == rank else self._received_slot(rank, piece)]


@dataclass(frozen=True)
class _Nodes:
    """Which ranks share memory."""

    members: list[list[int]]
    node_of: list[int]  # by rank: the index in members

    @property
    def count(self) -> int:
        return len(self.members)

    @staticmethod
    def of(reached: Sequence[set[int]]) -> "_Nodes":
        """`reached`: by rank, the others whose memory it can read."""
        members: list[list[int]] = []
        node_of: list[int] = []
        for rank, others in enumerate(reached):
            for node, ranks in enumerate(members):
                if all(other in others and rank in reached[other] for other in ranks):
                    ranks.append(rank)
                    node_of.append(node)
                    break
            else:
                node_of.append(len(members))
                members.append([rank])
        return _Nodes(members, node_of)

    def holder(self, reader: int, rank: int) -> int:
        """Return the rank in whose memory `rank` finds what `reader` has read."""
        node = self.node_of[rank]
        ranks = self.members[node]
        return reader if self.node_of[reader] == node else ranks[reader % len(ranks)]

    def receivers(self, reader: int) -> list[int]:
        """Return the ranks that receive what `reader` has read: one of each other machine."""
        return [
            ranks[reader % len(ranks)]
            for node, ranks in enumerate(self.members)
            if node != self.node_of[reader]
        ]


class _Tensors:
    """The tensors, which are filled in their order."""

    def __init__(self, headers: Sequence[Header], device: torch.device) -> None:
        self._stored = [(header.path, stored) for header in headers for stored in header.tensors]
        self._missing = [stored.end - stored.begin for _, stored in self._stored]
        self._device = device
        self._filling: dict[int, torch.Tensor] = {}
        self._next = 0

    def fill(self, piece: Piece, contents: torch.Tensor) -> None:
        for part in piece.parts:
            tensor = self._filling.get(part.tensor)
            if tensor is None:
                tensor = self._filling[part.tensor] = self._empty(part.tensor)
            into = tensor.reshape(-1).view(torch.uint8)[part.begin : part.begin + part.nbytes]
            into.copy_(contents[part.at : part.at + part.nbytes])
            self._missing[part.tensor] -= part.nbytes

    def finished(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are complete now."""
        while self._next < len(self._stored) and self._missing[self._next] == 0:
            index = self._next
            self._next += 1
            tensor = self._filling.pop(index, None)
            yield self._stored[index][1].name, self._empty(index) if tensor is None else tensor

    def _empty(self, index: int) -> torch.Tensor:
        path, stored = self._stored[index]
        return empty_tensor(stored, path, self._device)


class _Results:
    """Tensors on their way from the thread to the loop, of at most so many bytes. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._queue: queue.SimpleQueue[tuple[str, torch.Tensor] | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._nbytes = 0
        self._closed = False
        self._error: BaseException | None = None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Wait until there is room, or nobody takes any."""
        with self._condition:
            while not self._closed and self._nbytes > 0 and self._nbytes + tensor.nbytes > self._most_bytes:
                self._condition.wait()
            self._nbytes += tensor.nbytes
        self._queue.put((name, tensor))

    def end(self, error: BaseException | None) -> None:
        """There are no more; `error`: why."""
        self._error = error
        self._queue.put(None)

    def take(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors. Raises the error after the last."""
        while (found := self._queue.get()) is not None:
            with self._condition:
                self._nbytes -= found[1].nbytes
                self._condition.notify()
            yield found
            del found
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let put() no longer wait."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def is_closed(self) -> bool:
        return self._closed
