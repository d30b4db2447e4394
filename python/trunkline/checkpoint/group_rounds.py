"""Reads ranges of files once for all ranks of a process group: each reads a part, and the others get it.

Ranks on one machine share memory; what another machine has read comes over the group, once for a machine.

The files' bytes are divided into pieces, which the ranks read in turn. In each round

  1. every rank waits for its piece of the round, which it has read into memory that ranks share;
  2. all ranks learn whether every rank has its piece; if one has not, all raise;
  3. pieces are sent to the machines that do not have them, and all ranks learn when they are there;
  4. every rank copies all pieces of the round into its own tensors, and meanwhile reads its pieces to come.

After the last round all ranks learn whether one has failed in step 4. In step 2 of a round all ranks have
copied the pieces of the rounds before: their memory can be reused.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trunkline._core import File, Future
from trunkline._formats.safetensors import Header
from trunkline._formats.safetensors.pieces import Piece, cut
from trunkline.checkpoint.ranks.node_memory import NodeMemory
from trunkline.checkpoint.ranks.store import rank_error
from trunkline.checkpoint.reading_ranks import ReadingRanks

SLOTS = 3  # pieces of a rank in shared memory: one is copied, two are being read
_MIN_PIECE_BYTES = 1 << 20  # divides pieces; what checksums cover
_MAX_PIECE_BYTES = 64 << 20
_MAX_GAP_BYTES = 64 << 10  # between tensors, read rather than left out


class PieceUser(Protocol):
    """What verifies pieces and copies them, on every rank."""

    def verify(self, piece: Piece, contents: torch.Tensor) -> Any:
        """Verify what this rank has read. Returns what use() gets on all ranks. Raises if it is damaged."""

    def use(self, piece: Piece, contents: torch.Tensor, verified: Any) -> None:
        """Copy a piece; `verified`: what verify() returned on the rank that has read it."""

    def stop_reason(self) -> str | None:
        """Return why this rank ends early; None if it goes on."""


def cut_for_ranks(
    headers: Sequence[Header], ranks: int, memory_bytes: int, grains: Sequence[int]
) -> list[Piece]:
    """Return the pieces that hold the headers' tensors: for every rank some, if there are enough bytes.

    `memory_bytes`: of a rank, for reading.
    """
    total = sum(each.end - each.begin for header in headers for each in header.tensors)
    share = -(-total // (ranks * _MIN_PIECE_BYTES)) * _MIN_PIECE_BYTES
    most = memory_bytes // (2 * SLOTS) // _MIN_PIECE_BYTES * _MIN_PIECE_BYTES
    piece_bytes = max(min(share, most, _MAX_PIECE_BYTES), _MIN_PIECE_BYTES)
    return cut(headers, piece_bytes, _MAX_GAP_BYTES, grains)


class Rounds:
    """Reads the pieces; all ranks must have the same."""

    def __init__(
        self, ranks: ReadingRanks, files: Sequence[File], pieces: Sequence[Piece], user: PieceUser
    ) -> None:
        self._ranks = ranks
        self._files = files
        self._pieces = pieces
        self._user = user
        self.slot_bytes = -(-max((each.nbytes for each in pieces), default=1) // 4096) * 4096
        self._reads: dict[int, Future | Exception] = {}  # by round; an exception: it could not begin

    def run(self) -> None:
        """Read all pieces. A collective operation; raises RankError if another rank fails or ends early."""
        try:
            self._run()
        finally:
            for read in self._reads.values():
                if isinstance(read, Future):
                    with suppress(Exception):
                        read.result()  # the memory is in use until then

    def _run(self) -> None:
        nodes, memory = self._share_memory()
        try:
            self._start_read(memory, 0)
            self._start_read(memory, 1)
            error: Exception | None = None
            for number in range(-(-len(self._pieces) // self._ranks.size)):
                failed, verified = self._finish_read(memory, number)
                error = error or failed
                everyone = self._agree(error, self._user.stop_reason(), verified)
                self._exchange(nodes, memory, number)
                self._start_read(memory, number + 2)
                error = self._use(nodes, memory, number, everyone)
            self._agree(error, None, None)
        finally:
            memory.close()

    def _use(
        self, nodes: "_Nodes", memory: NodeMemory, number: int, verified: Sequence[Any]
    ) -> Exception | None:
        """Hand out all pieces of a round. Returns the error, which the other ranks have to learn."""
        try:
            for rank in range(self._ranks.size):
                piece = self._piece(number, rank)
                if piece is not None:
                    contents = self._view(nodes, memory, number, rank, piece)
                    self._user.use(piece, contents, verified[rank])
        except Exception as error:
            return error
        return None

    def _share_memory(self) -> tuple["_Nodes", NodeMemory]:
        """Allocate this rank's memory, and map that of the ranks on this machine."""
        # What other machines have read is received into slots after this rank's own; it may receive all.
        own = self.slot_bytes * SLOTS
        memory = NodeMemory(own, own + self.slot_bytes * self._ranks.size)
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
        begin = number % SLOTS * self.slot_bytes
        return slice(begin, begin + piece.nbytes)

    def _received_slot(self, rank: int, piece: Piece) -> slice:
        begin = (SLOTS + rank) * self.slot_bytes
        return slice(begin, begin + piece.nbytes)

    def _start_read(self, memory: NodeMemory, number: int) -> None:
        piece = self._piece(number, self._ranks.rank)
        if piece is None:
            return
        into = memory.own[self._own_slot(number, piece)]
        try:
            self._reads[number] = self._files[piece.file].async_pread(into, piece.begin)
        except Exception as error:  # which the other ranks learn in that round
            self._reads[number] = error

    def _finish_read(self, memory: NodeMemory, number: int) -> tuple[Exception | None, Any]:
        """Wait for this rank's piece of a round, and verify it. Returns the error, or what verify() did."""
        piece = self._piece(number, self._ranks.rank)
        if piece is None:
            return None, None
        read = self._reads.pop(number)
        if isinstance(read, Exception):
            return read, None
        try:
            read.result()
            return None, self._user.verify(piece, memory.own[self._own_slot(number, piece)])
        except Exception as error:
            return error, None

    def _agree(self, error: Exception | None, stop_reason: str | None, verified: Any) -> list[Any]:
        """Return what all ranks have verified. Raises on all ranks if one has an error, or ends early."""
        why = stop_reason if error is None else str(error) or type(error).__name__
        everyone = self._ranks.gather((why, verified))
        for rank, (text, _) in enumerate(everyone):
            if text is not None:
                if error is not None:
                    raise error
                raise rank_error(
                    rank, f"rank {rank} failed, which reads files with rank {self._ranks.rank}: {text}"
                )
        return [each for _, each in everyone]

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
