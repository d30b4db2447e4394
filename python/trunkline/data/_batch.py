"""What a Loader yields: the samples of a batch, in the memory that they were read into."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy

from trunkline.data._views import row_dtype

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from trunkline.data._index import Index


class Batch:
    """Samples that were read together, in memory that is theirs for as long as anything views it.

    The buffer goes back to the loader when the batch and all views of its memory are deleted: keep copy()
    rather than the batch, if you keep it. Pickling copies. Not synchronised.
    Made by Loader.
    """

    def __init__(
        self,
        index: "Index",
        memory: Any,
        offsets: "NDArray[numpy.int64]",
        lengths: "NDArray[numpy.int64]",
        indices: "NDArray[numpy.int64]",
        skipped: list[tuple[int, Exception]],
        epoch: int,
    ) -> None:
        """Private: batches come from a Loader."""
        self._index = index
        self.memory = memory
        """The bytes: a numpy array of uint8 (bytes,), writable; with device="cuda" a torch tensor there."""
        self.offsets = offsets
        """Where each sample begins in `memory`: int64 (samples,); (samples, ranges) if they have several."""
        self.lengths = lengths
        """How long each sample is, in bytes: int64 of the same shape as `offsets`."""
        self.indices = indices
        """Which samples these are: their numbers in the index, int64 (samples,)."""
        self.skipped = skipped
        """What on_error="skip" left out: (number of the sample, error) of each."""
        self.epoch = epoch
        """Which epoch the batch belongs to (int, from 0)."""

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} samples, {int(self.lengths.sum())} bytes, epoch {self.epoch}>"

    @functools.cached_property
    def samples(self) -> list[Any]:
        """A view of each sample, without a copy where its format allows that: see tl.data.index."""
        view = self._index._view if isinstance(self.memory, numpy.ndarray) else _view_on_device
        memory: Any = self.memory
        if isinstance(memory, numpy.ndarray):
            memory = memoryview(memory)  # type: ignore[arg-type]
        return [
            view(_pieces(memory, offsets, lengths), sample)
            for offsets, lengths, sample in zip(
                self.offsets.tolist(), self.lengths.tolist(), self.indices.tolist(), strict=True
            )
        ]

    @property
    def labels(self) -> "NDArray[numpy.int64]":
        """The class of each sample, int64 (samples,): see Index.labels."""
        return self._index.labels(self.indices)

    def array(self, dtype: "DTypeLike | None" = None) -> "NDArray[Any]":
        """Return samples of one size as an array (samples, items) of `dtype`: a view where they lie evenly.

        `dtype`: None is the dtype of the rows for format "npy", and uint8 for other formats.
        Raises ValueError if the samples differ in size, if their size is not a multiple of the item size, and
        for another dtype than that of the rows of .npy files: bytes are not converted.
        """
        if not isinstance(self.memory, numpy.ndarray):
            raise ValueError("array: the batch is in the memory of a GPU; use memory, offsets and lengths")
        kind = _dtype_of_items(dtype, self._index)
        sizes = numpy.unique(self.lengths)
        if self.lengths.ndim != 1 or len(sizes) > 1:
            raise ValueError(f"array: the samples have {len(sizes)} different sizes; use samples")
        size = int(sizes[0]) if len(sizes) else 0
        if size % kind.itemsize:
            raise ValueError(f"array: samples of {size} bytes do not consist of whole {kind} items")
        steps = numpy.unique(numpy.diff(self.offsets))
        step = int(steps[0]) if len(steps) == 1 else size
        if len(steps) > 1 or step < size:
            pieces = [self.memory[offset : offset + size] for offset in self.offsets.tolist()]
            return numpy.stack(pieces).view(kind)
        start = int(self.offsets[0]) if len(self) else 0
        rows = numpy.lib.stride_tricks.as_strided(self.memory[start:], (len(self), size), (step, 1))
        return rows.view(kind) if size else numpy.empty((len(self), 0), kind)

    def copy(self) -> "Batch":
        """Return a copy that can be kept: it does not hold a buffer of the loader."""
        return self._with_memory(
            self.memory.copy() if isinstance(self.memory, numpy.ndarray) else self.memory
        )

    def _with_memory(self, memory: Any) -> "Batch":
        parts = (self.offsets, self.lengths, self.indices, self.skipped, self.epoch)
        return Batch(self._index, memory, *parts)

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        parts = (self._index, self.memory, self.offsets, self.lengths, self.indices, self.skipped, self.epoch)
        return Batch, parts


def _dtype_of_items(dtype: "DTypeLike | None", index: "Index") -> "numpy.dtype[Any]":
    """Return the dtype of what array() returns. Raises ValueError if .npy files hold another one."""
    stored = row_dtype(index._info)
    if dtype is None:
        return numpy.dtype(numpy.uint8) if stored is None else stored
    kind = numpy.dtype(dtype)
    if stored is not None and kind != stored:
        raise ValueError(
            f"array: the rows of the .npy files are {stored}, not {kind}; call array() without a dtype, and "
            f'convert its result: array().astype("{kind}")'
        )
    return kind


def _pieces(memory: Any, offsets: int | list[int], lengths: int | list[int]) -> Any:
    if isinstance(offsets, list) and isinstance(lengths, list):
        return [memory[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
    assert isinstance(offsets, int)
    assert isinstance(lengths, int)
    return memory[offsets : offsets + lengths]


def _view_on_device(pieces: Any, sample: int) -> Any:
    return pieces


def batch_of(index: "Index", parts: tuple[Any, ...], epoch: int) -> Batch:
    """Make a Batch of what the native readers return."""
    memory, offsets, lengths, indices, skipped = parts
    ranges = index._ranges_per_sample
    if ranges > 1:
        offsets, lengths = offsets.reshape(-1, ranges), lengths.reshape(-1, ranges)
    return Batch(index, memory, offsets, lengths, indices, skipped, epoch)
