"""Bytes that ranks send each other, of which all ranks know who sends what to whom."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from trunkline._core import crc32c
from trunkline._errors import Error, RankError
from trunkline._tensor_io.memory import empty_bytes
from trunkline.checkpoint.directory.local_load import agree, raise_failure, reason
from trunkline.checkpoint.directory.local_save import LocalContext
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine

SLICE_BYTES = 16 << 20  # what a transfer should have at most
# What each rank sends before the checksums are compared: so many bytes (more if one transfer is larger), and
# so many transfers.
_ROUND_BYTES = 32 << 20
_ROUND_TRANSFERS = 8192


class Transfer(NamedTuple):
    """Bytes of one rank for another one."""

    sender: int
    receiver: int
    nbytes: int


class Batch(NamedTuple):
    """The bytes of some transfers, by their numbers, and why the others of them cannot be read."""

    memory: dict[int, torch.Tensor]
    failed: dict[int, OSError]


def run_transfers(
    ranks: Any,
    transfers: Sequence[Transfer],
    read: Callable[[list[int]], Batch],
    memory_for: Callable[[int], torch.Tensor],
    on_arrival: Callable[[int, torch.Tensor], None],
) -> dict[int, OSError]:
    """Make transfers, the same on all ranks, and compare checksums. Return what this rank could not read.

    read: called on the sender with the numbers of transfers, returns their bytes; other ranks learn which it
    cannot read, and do not get these. memory_for: called on the receiver before, returns the memory for one,
    and on_arrival: after it has arrived intact. All ranks raise if one of these raises an error, or if a rank
    does not come.
    """
    failed: dict[int, OSError] = {}
    error: BaseException | None = None  # which the others learn of in the next round
    for numbers in _rounds(transfers):
        outgoing: dict[int, torch.Tensor] = {}
        incoming: dict[int, dict[int, torch.Tensor]] = {}
        unreadable: list[int] = []
        if error is None:
            try:
                batch = read([each for each in numbers if transfers[each].sender == ranks.rank])
                failed |= batch.failed
                unreadable = sorted(batch.failed)
                outgoing = _joined(transfers, batch.memory)
                for each in numbers:
                    if transfers[each].receiver == ranks.rank:
                        incoming.setdefault(transfers[each].sender, {})[each] = memory_for(each)
            except BaseException as other:
                error = other
        own = {receiver: crc32c(memory) for receiver, memory in outgoing.items()}
        theirs = ranks.gather((own, unreadable, reason(error)))
        raise_failure([why for _, _, why in theirs], error)
        for sender, memory in incoming.items():
            for each in theirs[sender][1]:
                memory.pop(each, None)
        arriving = {sender: _one(list(memory.values())) for sender, memory in incoming.items() if memory}
        ranks.transfer(
            [(memory, receiver) for receiver, memory in outgoing.items()],
            [(memory, sender) for sender, memory in arriving.items()],
        )
        try:
            for sender, arrived in arriving.items():
                if crc32c(arrived) != theirs[sender][0][ranks.rank]:
                    raise Error(None, f"bytes from rank {sender} arrived damaged")
                _split(arrived, list(incoming[sender].values()))
                for each, part in incoming[sender].items():
                    on_arrival(each, part)
        except BaseException as other:
            error = other
    agree(ranks, error)
    return failed


def _joined(transfers: Sequence[Transfer], memory: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what each receiver gets: its transfers one after the other."""
    of_receiver: dict[int, list[torch.Tensor]] = {}
    for each in sorted(memory):
        of_receiver.setdefault(transfers[each].receiver, []).append(memory[each])
    return {
        receiver: several[0] if len(several) == 1 else torch.cat(several)
        for receiver, several in of_receiver.items()
    }


def _one(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return memory for all of these parts, one after the other: the part itself if it is the only one."""
    return parts[0] if len(parts) == 1 else empty_bytes(sum(each.numel() for each in parts))


def _split(memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill parts from memory that _one() has returned."""
    begin = 0
    for each in parts if len(parts) > 1 else ():
        each.copy_(memory[begin : begin + each.numel()])
        begin += each.numel()


class Transport(NamedTuple):
    """How the ranks of a call reach each other.

    exchange: for messages, with heartbeats; group: returns the process group, for bytes.
    """

    context: LocalContext
    exchange: Exchange | None
    group: Callable[[], Any]

    def run_transfers(
        self,
        topic: str,
        transfers: Sequence[Transfer],
        read: Callable[[list[int]], Batch],
        memory_for: Callable[[int], torch.Tensor],
        on_arrival: Callable[[int, torch.Tensor], None],
        but: str,
    ) -> dict[int, OSError]:
        """Do what run_transfers() does. If a rank dies meanwhile, all others raise RankError, which names it.

        The process group only reports that some rank does not answer; heartbeats in the exchange show which.
        """
        from trunkline.checkpoint.reading_ranks import ReadingRanks

        seconds = self.context.ranks.timeout
        failed: dict[int, OSError] = {}
        problem: RankError | None = None
        try:
            ranks = ReadingRanks(self.group(), None if seconds is None else timedelta(seconds=seconds))
            try:
                failed = run_transfers(ranks, transfers, read, memory_for, on_arrival)
            finally:
                ranks.close()
        except RankError as error:
            problem = error
        reasons = combine(self.exchange, topic, reason(problem), lambda reasons: reasons, but)
        raise_failure(reasons, problem)
        return failed


def _rounds(transfers: Sequence[Transfer]) -> Iterator[list[int]]:
    """Yield the numbers of transfers that are on their way at a time: of each sender some."""
    waiting: dict[int, list[int]] = {}
    for number in reversed(range(len(transfers))):
        waiting.setdefault(transfers[number].sender, []).append(number)
    while waiting:
        batch: list[int] = []
        for sender in sorted(waiting):
            queue, nbytes = waiting[sender], 0
            first = len(batch)
            while queue and (nbytes == 0 or nbytes + transfers[queue[-1]].nbytes <= _ROUND_BYTES):
                if len(batch) - first == _ROUND_TRANSFERS:
                    break
                batch.append(queue.pop())
                nbytes += transfers[batch[-1]].nbytes
            if not queue:
                del waiting[sender]
        yield sorted(batch)
