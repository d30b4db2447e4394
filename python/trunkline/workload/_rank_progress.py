"""How far each rank of a run is, in memory that the ranks share with the process that started them."""

import mmap
import struct
from typing import Protocol

_RECORD = struct.Struct("<qd")  # done, utilization; a negative one is not known

UNKNOWN = -1.0


class Report(Protocol):
    """Takes what a rank has done so far, and how busy its accelerator was; may raise to end the rank."""

    def __call__(self, done: int, utilization: float = UNKNOWN, /) -> object:
        """`utilization`: a share of 1."""


class RankProgress:
    """What the ranks of one run last reported. Each rank writes its own record only."""

    def __init__(self, descriptor: int, begin: int, ranks: int) -> None:
        """Map the records, which begin at that byte of the shared memory."""
        self._memory = mmap.mmap(descriptor, begin + ranks * _RECORD.size)
        self._begin = begin
        self._ranks = ranks

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes that the records take."""
        return ranks * _RECORD.size

    def set(self, rank: int, done: int, utilization: float) -> None:
        """Record how far a rank is."""
        _RECORD.pack_into(self._memory, self._begin + rank * _RECORD.size, done, utilization)

    def least(self) -> tuple[int, float]:
        """Return what all ranks have done, and their mean utilization."""
        records = [
            _RECORD.unpack_from(self._memory, self._begin + rank * _RECORD.size)
            for rank in range(self._ranks)
        ]
        known = [utilization for _, utilization in records if utilization >= 0]
        return min(done for done, _ in records), sum(known) / len(known) if known else UNKNOWN

    def close(self) -> None:
        """Unmap the records."""
        self._memory.close()
