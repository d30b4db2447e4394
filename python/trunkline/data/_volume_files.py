"""The files of a Volume, as the list that an index is made of."""

import os
from collections.abc import Iterable
from typing import Any

import numpy

from trunkline._core import Volume, file_stamp
from trunkline._errors import Unsupported
from trunkline.data._listing import Listing


def list_volume(volume: Volume, names: Any, format: str) -> Listing:  # noqa: A002
    """List files of a volume in the order of their names. Raises trunkline.Error if one cannot be opened."""
    if not isinstance(volume, Volume):
        raise TypeError(f"volume: must be a trunkline.Volume, not {type(volume).__name__}")
    if format != "records":
        raise Unsupported(
            None,
            f'volume: format {format!r} is not supported; files of a volume are read as format "records": '
            "pass record_bytes, or put the files into a folder",
        )
    given = (
        [names] if isinstance(names, str | bytes | os.PathLike) or not isinstance(names, Iterable) else names
    )
    encoded = sorted(os.fsencode(name) for name in given)
    if not encoded:
        raise ValueError("paths: must name at least one file of the volume")
    if len(set(encoded)) != len(encoded):
        raise ValueError("paths: a file of the volume is given twice")
    stamps = []
    for name in encoded:
        with volume.open(os.fsdecode(name)) as file:
            stamps.append(file_stamp(file))
    sizes, mtimes_ns, inodes = zip(*stamps, strict=True)
    count = len(encoded)
    return Listing(
        root=b"",
        given="",
        path_blob=numpy.frombuffer(b"".join(encoded), numpy.uint8),
        path_ends=numpy.cumsum([len(name) for name in encoded], dtype=numpy.uint64),
        sizes=numpy.array(sizes, numpy.uint64),
        mtimes_ns=numpy.array(mtimes_ns, numpy.int64),
        inodes=numpy.array(inodes, numpy.uint64),
        kinds=numpy.zeros(count, numpy.uint8),
        listed=numpy.ones(count, numpy.uint8),
        class_of=numpy.full(count, -1, numpy.int64),
        classes=[],
    )
