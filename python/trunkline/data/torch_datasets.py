"""Datasets for torch's DataLoader and torchdata's StatefulDataLoader, on top of trunkline.data."""

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trunkline._core import SampleReader
from trunkline.data._batch import batch_of
from trunkline.data._index import Index
from trunkline.data._loader import Loader
from trunkline.data.native import has_tfrecord_framing, table_of


class BatchDataset(IterableDataset[Any]):
    """The batches of a Loader, for DataLoader(dataset, batch_size=None) and StatefulDataLoader.

    The batches are the same, in the same order, for any number of workers: each reads its share of them.
    State is the worker's own; StatefulDataLoader keeps it for each. With workers that end after each epoch
    (persistent_workers=False), call set_epoch() before each, as for torch's DistributedSampler.
    """

    def __init__(self, loader: Loader) -> None:
        """`loader`: not used otherwise. Raises TypeError for anything but a Loader."""
        if not isinstance(loader, Loader):
            raise TypeError(f"loader: must be a trunkline.data.Loader, not {type(loader).__name__}")
        self._loader = loader
        self._has_ended = False  # the epoch of the state that was loaded

    def __iter__(self) -> Iterator[Any]:
        if self._has_ended:
            self._has_ended = False
            return iter(())
        worker = get_worker_info()
        share, shares = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return self._loader._epoch(share, shares)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop that of this epoch."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As Loader.state_dict, of this worker.

        After the last batch it is the end of its epoch, not the beginning of the next one, until the loop has
        ended: so torch's loaders expect it, and all workers agree.
        """
        state = self._loader.state_dict()
        if self._loader._is_at_end:
            state |= {"epoch": state["epoch"] - 1, "samples": len(self._loader.index)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As Loader.load_state_dict, of this worker."""
        self._loader.load_state_dict(state)
        self._has_ended = state["samples"] == len(self._loader.index)


class SampleDataset(Dataset[Any]):
    """Samples by their number, for samplers of torch: DataLoader(dataset, batch_size=64, sampler=...).

    DataLoader passes it all numbers of a batch, which are read at once. Each sample is a view of its bytes (a
    numpy array of uint8 where its format has no other type), or what decode makes of it; with labels=True a
    pair of that and its class.
    """

    def __init__(
        self,
        index: Index,
        decode: Callable[[Any], Any] | None = None,
        *,
        labels: bool = False,
    ) -> None:
        """Raises TypeError for anything but an Index, ValueError for labels of an index without classes."""
        if not isinstance(index, Index):
            raise TypeError(f"index: must be a trunkline.data.Index, not {type(index).__name__}")
        if labels and not index.classes:
            raise ValueError(
                "labels: the index has no classes: its files are not in one folder for each class"
            )
        self._index = index
        self._decode = decode
        self._labels = labels
        self._reader: SampleReader | None = None
        self._process = 0

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, sample: int) -> Any:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: list[int]) -> list[Any]:
        """Read all of them at once."""
        if self._reader is None or self._process != os.getpid():
            self._process = os.getpid()
            self._reader = SampleReader(
                table_of(self._index),
                tfrecord=has_tfrecord_framing(self._index),
                skip_damaged=False,
                engine=None,
                volume=self._index._volume,
            )
        wanted = _numbers_of(samples, len(self._index))
        batch = batch_of(self._index, self._reader.read(wanted), 0)
        made = [self._made(sample) for sample in batch.samples]
        return list(zip(made, batch.labels.tolist(), strict=True)) if self._labels else made

    def _made(self, sample: Any) -> Any:
        if self._decode is not None:
            return self._decode(sample)
        return numpy.frombuffer(sample, numpy.uint8) if isinstance(sample, memoryview) else sample

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


def _numbers_of(samples: list[int], count: int) -> "numpy.ndarray[Any, numpy.dtype[numpy.int64]]":
    """Return the numbers of samples; negative ones count from the end. Raises what _reject() does."""
    try:
        numbers = numpy.fromiter(map(operator.index, samples), numpy.int64, len(samples))
    except (TypeError, OverflowError):
        _reject(samples, count)
        raise
    if numbers.size and not -count <= int(numbers.min()) <= int(numbers.max()) < count:
        _reject(samples, count)
    numbers[numbers < 0] += count
    return numbers


def _reject(samples: list[int], count: int) -> None:
    """Raise TypeError or IndexError for the first number that is not one of a sample."""
    for sample in samples:
        if not hasattr(sample, "__index__"):
            raise TypeError(f"sample: must be an integer, not {type(sample).__name__}")
        if not -count <= sample < count:
            raise IndexError(f"sample {sample} is out of range: there are {count}, numbered from 0")
