"""Where the bytes of tensors are: runs of bytes in files with checksums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy
import numpy.typing

Integers: TypeAlias = "numpy.typing.NDArray[numpy.int64]"


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A file to read.

    `checksums`: the CRC-32C of each `chunk_bytes` from `chunks_begin` on; none: it has no checksums.
    """

    path: str
    nbytes: int
    chunk_bytes: int
    checksums: Sequence[int]
    chunks_begin: int = 0

    @property
    def is_verified(self) -> bool:
        """Whether what is read is compared with checksums."""
        return len(self.checksums) > 0 or self.nbytes <= self.chunks_begin


class Runs(NamedTuple):
    """Runs of bytes of one file: where each is in the tensor and in the file, and its size in bytes."""

    file: SourceFile
    at: Integers
    begin: Integers
    nbytes: Integers


class Stored(Protocol):
    """The bytes of a tensor, in the order of its elements; those that no run has are zeros."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""

    @property
    def run_bytes(self) -> int:
        """The size of most runs: how small they are says how many a window of the tensor has."""

    @property
    def has_gaps(self) -> bool:
        """Whether there may be bytes that no run has."""

    def runs(self, begin: int, end: int) -> Iterator[Runs]:
        """Yield the runs within bytes [begin, end) of the tensor, cut to these."""

    def files(self) -> Iterator[SourceFile]:
        """Yield the files."""


class Piece(NamedTuple):
    """Consecutive bytes of a tensor in a file."""

    file: SourceFile
    begin: int
    nbytes: int


class Pieces:
    """A tensor that is in one or a few pieces, one after another."""

    has_gaps = False

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Take the pieces in the order of the tensor's bytes."""
        self._pieces = [piece for piece in pieces if piece.nbytes > 0]
        self.nbytes = sum(piece.nbytes for piece in self._pieces)
        self.run_bytes = max(1, self.nbytes // max(1, len(self._pieces)))

    def runs(self, begin: int, end: int) -> Iterator[Runs]:
        """Yield the runs within bytes [begin, end) of the tensor."""
        at = 0
        for file, offset, nbytes in self._pieces:
            low, high = max(begin, at), min(end, at + nbytes)
            if low < high:
                where = (numpy.array([value], numpy.int64) for value in (low, offset + low - at, high - low))
                yield Runs(file, *where)
            at += nbytes

    def files(self) -> Iterator[SourceFile]:
        """Yield the files of the pieces."""
        for piece in self._pieces:
            yield piece.file
