"""Samples for training: read at random from files of many formats, shuffled, sharded, resumable.

    import trunkline as tl

    index = tl.data.index("/data/imagenet/train")
    for batch in tl.data.Loader(index, batch_size=256):
        batch.samples, batch.labels

`BatchDataset` and `SampleDataset` are for torch's DataLoader, and are imported at first use.
"""

from typing import TYPE_CHECKING, Any

from trunkline.data._batch import Batch
from trunkline.data._build import index
from trunkline.data._index import Index
from trunkline.data._loader import Loader

if TYPE_CHECKING:
    from trunkline.data.torch_datasets import BatchDataset, SampleDataset

__all__ = ["Batch", "BatchDataset", "Index", "Loader", "SampleDataset", "index"]

for _public in (Batch, Index, Loader, index):
    _public.__module__ = "trunkline.data"


def __getattr__(name: str) -> Any:
    """Import what needs torch at first use."""
    if name in ("BatchDataset", "SampleDataset"):
        from trunkline.data import torch_datasets

        return getattr(torch_datasets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
