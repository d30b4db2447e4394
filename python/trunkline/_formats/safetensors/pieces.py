"""Divides the bytes of tensors in safetensors files into pieces, whatever the tensors' sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trunkline._formats.safetensors.loader import Header


@dataclass(frozen=True)
class Part:
    """The bytes of a tensor that are in a piece."""

    tensor: int  # its index among the tensors of all files
    begin: int  # in the tensor
    at: int  # in the piece
    nbytes: int


@dataclass
class Piece:
    """A range of a file."""

    file: int  # index
    begin: int
    end: int
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.end - self.begin


def cut(headers: Sequence[Header], piece_bytes: int, max_gap: int, grains: Sequence[int]) -> list[Piece]:
    """Return the pieces that hold the headers' tensors, in the order of the files and of their bytes.

    Offsets within a file's data are divided at multiples of `piece_bytes`, and at gaps of more than `max_gap`
    bytes between tensors. Pieces begin and end at multiples of the file's grain in `grains`, which divides
    `piece_bytes`, or at the end of the data. Tensors without bytes have no parts.
    """
    pieces: list[Piece] = []
    first = 0
    for file, (header, grain) in enumerate(zip(headers, grains, strict=True)):
        data = len(header.head)
        current: Piece | None = None
        for index, stored in enumerate(header.tensors, first):
            position = stored.begin
            while position < stored.end:
                border = data + ((position - data) // piece_bytes + 1) * piece_bytes
                end = min(stored.end, border)
                if (
                    current is None
                    or position - current.end > max_gap
                    or position >= data + _border_after(current.begin - data, piece_bytes)
                ):
                    current = Piece(file, position - (position - data) % grain, end)
                    pieces.append(current)
                current.end = min(end + -(end - data) % grain, header.file_bytes)
                current.parts.append(
                    Part(index, position - stored.begin, position - current.begin, end - position)
                )
                position = end
        first += len(header.tensors)
    return pieces


def _border_after(offset: int, piece_bytes: int) -> int:
    return (offset // piece_bytes + 1) * piece_bytes
