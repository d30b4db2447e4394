"""The formats of samples, and which of them a file's name suggests."""

import re

# "files" stands for all other names.
KINDS = ("files", "npy", "npz", "tfrecord", "webdataset", "parquet")
FORMATS = ("files", "records", "npy", "npz", "tfrecord", "webdataset", "parquet")

_SUFFIXES = {
    b".npy": "npy",
    b".npz": "npz",
    b".tfrecord": "tfrecord",
    b".tfrecords": "tfrecord",
    b".tfrec": "tfrecord",
    b".tar": "webdataset",
    b".parquet": "parquet",
}
_SUFFIX = re.compile(rb"(\.[a-z]+)(?:-\d+-of-\d+)?\Z")
_CODES = {suffix: KINDS.index(kind) for suffix, kind in _SUFFIXES.items()}


def kind_of(path: bytes) -> int:
    """Return the place in KINDS. "train.tfrecord-00000-of-00008" counts as a .tfrecord, too."""
    match = _SUFFIX.search(path[-64:].lower())
    return _CODES.get(match[1], 0) if match else 0
