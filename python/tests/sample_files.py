"""Tiny data sets in the formats that tl.data.index() reads, written by plain Python."""

from __future__ import annotations

import io
import random
import struct
import tarfile
from pathlib import Path

import numpy
import pyarrow.parquet

from trunkline._core import crc32c


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


def masked_crc(data: bytes) -> bytes:
    """A CRC-32C as TFRecord files have it."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(data: bytes) -> bytes:
    """One record."""
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


def tfrecords(path: Path, count: int, nbytes: int = 50) -> list[bytes]:
    """Write records of random bytes; return these."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = random.Random(str(path))
    records = [generator.randbytes(generator.randrange(nbytes)) for _ in range(count)]
    path.write_bytes(b"".join(map(tfrecord, records)))
    return records


Sample = dict[str, bytes]


def webdataset(path: Path, samples: dict[str, Sample], tar_format: int = tarfile.PAX_FORMAT) -> None:
    """Write the members of samples, by key and extension, into an archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as archive:
        for key, members in samples.items():
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def random_samples(count: int, prefix: str = "") -> dict[str, Sample]:
    generator = random.Random(prefix)
    return {
        f"{prefix}{each:05}": {
            "jpg": generator.randbytes(generator.randrange(3000)),
            "cls": str(each).encode(),
            "seg.png": b"",
        }
        for each in range(count)
    }


def parquet(path: Path, groups: int, rows: int = 100, compression: str = "snappy") -> pyarrow.Table:
    """Write a table of several row groups."""
    count = groups * rows
    generator = numpy.random.default_rng(count)
    table = pyarrow.table(
        {
            "id": numpy.arange(count),
            "text": [f"row {each}" * (each % 7) for each in range(count)],
            "list": [[each, each + 1][: each % 3] for each in range(count)],
            "struct": [{"a": each, "b": str(each)} if each % 5 else None for each in range(count)],
            "value": generator.random(count),
        }
    )
    pyarrow.parquet.write_table(table, path, row_group_size=rows, compression=compression)
    return table


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
    chosen = slice(sample * k, sample * k + k)
    pairs = zip(index._offsets[chosen], index._lengths[chosen], strict=True)  # type: ignore[attr-defined]
    return path, [(int(offset), int(length)) for offset, length in pairs]


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
