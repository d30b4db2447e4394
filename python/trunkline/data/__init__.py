"""Samples for training, read at random from files of many formats.

import trunkline as tl

index = tl.data.index("/data/imagenet/train")
len(index), index.classes, index.labels([0, 1, 2])
"""

from trunkline.data._build import index
from trunkline.data._index import Index

__all__ = ["Index", "index"]

for _public in (Index, index):
    _public.__module__ = "trunkline.data"
