"""Bytes and sizes of generated samples: a function of the seed and the file's number alone.

They come from the raw output of numpy's Philox, which numpy promises never to change.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy

from trunkline.workload._data_files import PARTS, DataFile
from trunkline.workload._spec import Normal

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_BYTES = 1 << 20
_BLOCKS = 4


def _stream(seed: int, file: DataFile | None, purpose: int) -> numpy.random.Philox:
    part, number = (PARTS.index(file.part) + 1, file.number) if file else (0, 0)
    key = numpy.array([seed & (2**64 - 1), (part << 60) | (purpose << 56) | number], dtype=numpy.uint64)
    return numpy.random.Philox(key=key)


class Content:
    """Bytes of all files of a data set, which neither compress nor repeat. Thread-safe.

    Each mebibyte is one of a few random blocks, combined with a random word of its own: as fast as a copy.
    """

    def __init__(self, seed: int) -> None:
        """`seed`: of the data set."""
        self._seed = seed
        words = _stream(seed, None, 0).random_raw(_BLOCKS * _BLOCK_BYTES // 8)
        self._blocks = words.astype("<u8").reshape(_BLOCKS, -1)

    def reader(self, file: DataFile) -> "ContentReader":
        """Return the bytes of a file, from its start."""
        return ContentReader(self._block, _stream(self._seed, file, 1))

    def _block(self, key: int) -> memoryview:
        return memoryview((self._blocks[key % _BLOCKS] ^ numpy.uint64(key)).view(numpy.uint8))


class ContentReader:
    """Reads the bytes of one file. Of one thread."""

    def __init__(self, block: Callable[[int], memoryview], keys: numpy.random.Philox) -> None:
        """`block` returns the mebibyte of a key."""
        self._block = block
        self._keys = keys
        self._left = memoryview(b"")

    def chunks(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next `nbytes` bytes, in chunks of at most a mebibyte."""
        while nbytes > 0:
            if not self._left:
                self._left = self._block(int(self._keys.random_raw()))
            chunk = self._left[:nbytes]
            self._left = self._left[len(chunk) :]
            nbytes -= len(chunk)
            yield chunk

    def take(self, nbytes: int) -> bytes:
        """Return the next `nbytes` bytes."""
        return b"".join(self.chunks(nbytes))


def sample_sizes(record: Normal, seed: int, file: DataFile, count: int) -> "NDArray[numpy.int64]":
    """Return the bytes of each of `count` samples of a file.

    From the normal distribution, without what is below 1 or above twice the mean: so the mean holds.
    """
    if record.stdev == 0:
        return numpy.full(count, max(1, round(record.mean)), dtype=numpy.int64)
    stream = _stream(seed, file, 2)
    found: list[NDArray[numpy.float64]] = []
    missing = count
    while missing > 0:
        raw = stream.random_raw(2 * (missing + 4)).astype(numpy.uint64) >> numpy.uint64(11)
        first, second = raw.astype(numpy.float64).reshape(2, -1) / 2.0**53
        normal = numpy.sqrt(-2.0 * numpy.log(1.0 - first)) * numpy.cos(2.0 * numpy.pi * second)  # Box-Muller
        sizes = record.mean + record.stdev * normal
        found.append(sizes[(sizes >= 1) & (sizes <= 2 * record.mean - 1)][:missing])
        missing -= len(found[-1])
    return numpy.rint(numpy.concatenate(found)).astype(numpy.int64)
