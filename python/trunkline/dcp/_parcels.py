"""Bytes that ranks send each other, of which all ranks know who sends what to whom."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from trunkline._core import crc32c
from trunkline._errors import Error
from trunkline.checkpoint.directory.local_load import agree, raise_failure, reason
from trunkline.checkpoint.directory.local_save import LocalContext

_ROUND_BYTES = 32 << 20  # that each rank sends before the checksums are compared, unless one parcel is larger


def reading_ranks(context: LocalContext, group: Callable[[], Any]) -> Any:
    """Return the ranks of a Checkpointer, which can send each other bytes. Collective; close() it."""
    from trunkline.checkpoint.reading_ranks import ReadingRanks

    seconds = context.ranks.timeout
    return ReadingRanks(group(), None if seconds is None else timedelta(seconds=seconds))


class Parcel(NamedTuple):
    """Bytes of one rank for another one."""

    sender: int
    receiver: int
    nbytes: int


def send_all(
    ranks: Any,
    parcels: Sequence[Parcel],
    read: Callable[[int], torch.Tensor],
    memory_for: Callable[[int], torch.Tensor],
    take: Callable[[int, torch.Tensor], None],
) -> dict[int, OSError]:
    """Send parcels, the same on all ranks, and compare checksums. Return what this rank could not read.

    read: called on the sender with the number of a parcel, returns its bytes; the others learn of an OSError,
    and do not get that parcel. memory_for: called on the receiver before, returns the memory for it, and
    take: after it has arrived. Raises RankError if a rank does not come, or raises another error.
    """
    failed: dict[int, OSError] = {}
    for batch in _rounds(parcels):
        sends: dict[int, torch.Tensor] = {}
        error: Exception | None = None
        for number in batch:
            if parcels[number].sender == ranks.rank:
                try:
                    sends[number] = read(number)
                except OSError as unreadable:
                    failed[number] = unreadable
                except Exception as other:
                    error = other
        checksums = _checksums_of_all(ranks, sends, error)
        arrive = {
            number: memory_for(number)
            for number in batch
            if parcels[number].receiver == ranks.rank and number in checksums
        }
        ranks.transfer(
            [(memory, parcels[number].receiver) for number, memory in sends.items()],
            [(memory, parcels[number].sender) for number, memory in arrive.items()],
        )
        wrong = [number for number, memory in arrive.items() if crc32c(memory) != checksums[number]]
        agree(
            ranks,
            Error(None, f"bytes from rank {parcels[wrong[0]].sender} arrived damaged") if wrong else None,
        )
        for number, memory in arrive.items():
            take(number, memory)
    return failed


def _checksums_of_all(ranks: Any, sends: dict[int, torch.Tensor], error: Exception | None) -> dict[int, int]:
    """Return the checksums of the parcels that are sent, by their numbers. Raises if a rank has failed."""
    own = {number: crc32c(memory) for number, memory in sends.items()}
    theirs = ranks.gather((own, reason(error)))
    raise_failure([why for _, why in theirs], error)
    return {number: checksum for of_rank, _ in theirs for number, checksum in of_rank.items()}


def _rounds(parcels: Sequence[Parcel]) -> Iterator[list[int]]:
    """Yield the numbers of parcels that are on their way at a time: of each sender some."""
    waiting: dict[int, list[int]] = {}
    for number in reversed(range(len(parcels))):
        waiting.setdefault(parcels[number].sender, []).append(number)
    while waiting:
        batch: list[int] = []
        for sender in sorted(waiting):
            queue, nbytes = waiting[sender], 0
            while queue and (nbytes == 0 or nbytes + parcels[queue[-1]].nbytes <= _ROUND_BYTES):
                batch.append(queue.pop())
                nbytes += parcels[batch[-1]].nbytes
            if not queue:
                del waiting[sender]
        yield batch
