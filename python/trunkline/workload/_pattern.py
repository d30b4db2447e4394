"""Contents of tensors that are saved: a function of a seed and of numbers, and the comparison with it."""

from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_BYTES = 1 << 20
_BLOCKS = 4
_WORD = 2**64 - 1


class Pattern:
    """Bytes that neither compress nor repeat, at the speed of a copy.

    Each mebibyte is one of a few random blocks, combined with a word of its own.
    """

    def __init__(self, seed: int) -> None:
        """`seed`: of the workload."""
        words = numpy.random.Philox(key=seed & _WORD).random_raw(_BLOCKS * _BLOCK_BYTES // 8)
        self._blocks = words.astype("<u8").reshape(_BLOCKS, -1)
        self._seed = seed

    def fill(self, target: "NDArray[numpy.uint8]", *numbers: int) -> None:
        """Write the bytes that belong to these numbers."""
        for begin in range(0, len(target), _BLOCK_BYTES):
            part = target[begin : begin + _BLOCK_BYTES]
            part[:] = self._block(begin, numbers)[: len(part)]

    def first_difference(self, found: "NDArray[numpy.uint8]", *numbers: int) -> int | None:
        """Return where the array first differs from the bytes that belong to these numbers."""
        for begin in range(0, len(found), _BLOCK_BYTES):
            part = found[begin : begin + _BLOCK_BYTES]
            wanted = self._block(begin, numbers)[: len(part)]
            if not numpy.array_equal(part, wanted):
                return begin + int(numpy.argmax(part != wanted))
        return None

    def _block(self, begin: int, numbers: tuple[int, ...]) -> "NDArray[numpy.uint8]":
        word = self._seed & _WORD
        for number in (*numbers, begin):
            word = _mixed(word ^ number)
        block: NDArray[numpy.uint8] = (self._blocks[word % _BLOCKS] ^ numpy.uint64(word)).view(numpy.uint8)
        return block


def _mixed(word: int) -> int:
    """Return another word for each word (the finalizer of SplitMix64, Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
