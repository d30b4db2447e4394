"""Tiny data sets in the formats that tl.data.index() reads, written by plain Python."""

from __future__ import annotations

import random
from pathlib import Path

import numpy


def class_folders(root: Path, classes: dict[str, int], nbytes: int = 100) -> dict[str, bytes]:
    """Write so many files into a folder of each class; return the contents by path, sorted."""
    contents = {}
    for name, count in classes.items():
        for each in range(count):
            path = root / name / f"{each:03}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = random.Random(str(path)).randbytes(nbytes + each)
            path.write_bytes(data)
            contents[str(path)] = data
    return dict(sorted(contents.items()))


def npy_rows(path: Path, rows: int, shape: tuple[int, ...] = (3, 2), dtype: str = "<f4") -> numpy.ndarray:
    """Write an array of random rows."""
    generator = numpy.random.default_rng(rows)
    array = generator.integers(0, 1000, (rows, *shape)).astype(dtype)
    numpy.save(path, array)
    return array


def ranges_of(index: object, sample: int) -> tuple[str, list[tuple[int, int]]]:
    """The file of a sample, and (offset, length) of each of its ranges, computed from the private arrays."""
    firsts = index._first_samples  # type: ignore[attr-defined]
    file = int(numpy.searchsorted(firsts, sample, side="right")) - 1
    path = index.paths[file]  # type: ignore[attr-defined]
    if index._offsets is None:  # type: ignore[attr-defined]
        begin = int(index._first_offsets[file])  # type: ignore[attr-defined]
        begin += (sample - int(firsts[file])) * index._stride_bytes  # type: ignore[attr-defined]
        return path, [(begin, index._record_bytes)]  # type: ignore[attr-defined]
    k = index._ranges_per_sample  # type: ignore[attr-defined]
    pairs = zip(index._offsets, index._lengths, strict=True)  # type: ignore[attr-defined]
    chosen = list(pairs)[sample * k : sample * k + k]
    return path, [(int(offset), int(length)) for offset, length in chosen]


def view(index: object, sample: int) -> object:
    """What a loader hands out for a sample: read by plain Python, and viewed by the index."""
    path, ranges = ranges_of(index, sample)
    data = Path(path).read_bytes()
    pieces = []
    for offset, length in ranges:
        assert offset + length <= len(data)
        pieces.append(memoryview(data)[offset : offset + length])
    if index._framing == "tfrecord":  # type: ignore[attr-defined]
        pieces = [pieces[0][12:-4]]
    return index._view(pieces if len(pieces) > 1 else pieces[0], sample)  # type: ignore[attr-defined]
