"""Writes one file of a data set, in each of the formats."""

import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

import numpy

from trunkline._core import crc32c
from trunkline.workload._content import Content, sample_sizes
from trunkline.workload._data_files import DataFile
from trunkline.workload._spec import Dataset

_FLUSH_BYTES = 4 << 20
NPY_HEADER_BYTES = 128  # of the .npy files below
_PLAIN = ("float16", "float32", "float64", "int32", "int64", "uint32", "uint64")  # types that Parquet has


@dataclass(frozen=True)
class Source:
    """What files are made of."""

    dataset: Dataset
    seed: int
    content: Content
    check: Callable[[], None]  # called now and then; raises to end the writing


def write_file(source: Source, file: DataFile, out: IO[bytes], index: "Callable[[str], IO[bytes]]") -> None:
    """Write a file. `index(suffix)` opens one beside it, for indexed_binary."""
    formats = {"npz": _npz, "npy": _npy, "tfrecord": _tfrecord, "parquet": _parquet}
    if source.dataset.format == "indexed_binary":
        _indexed_binary(source, file, out, index)
    else:
        formats.get(source.dataset.format, _opaque)(source, file, out)


def _sizes(source: Source, file: DataFile, count: int | None = None) -> Any:
    dataset = source.dataset
    count = dataset.samples_per_file if count is None else count
    return sample_sizes(dataset.record_bytes, source.seed, file, count)


def _copy(source: Source, out: IO[bytes], pieces: Iterable[memoryview]) -> None:
    for piece in pieces:
        source.check()
        out.write(piece)


def _opaque(source: Source, file: DataFile, out: IO[bytes]) -> None:
    """Images: bytes of the right size, which no library can decode."""
    _copy(source, out, source.content.reader(file).chunks(int(_sizes(source, file).sum())))


def _array_header(out: IO[bytes], sample_bytes: int, samples: int) -> None:
    """Of an array (sample_bytes, 1, samples) in Fortran order, as DLIO's readers expect it: samples lie
    one after another.
    """
    fields = {"descr": "|u1", "fortran_order": True, "shape": (sample_bytes, 1, samples)}
    text = repr(fields).encode()
    length = NPY_HEADER_BYTES - 10
    out.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1) + b"\n")


def _npy(source: Source, file: DataFile, out: IO[bytes]) -> None:
    """All samples of a file have one size."""
    [size] = _sizes(source, file, 1).tolist()
    samples = source.dataset.samples_per_file
    _array_header(out, size, samples)
    _copy(source, out, source.content.reader(file).chunks(size * samples))


def _npz(source: Source, file: DataFile, out: IO[bytes]) -> None:
    """A member for each sample: "x", or "x0", "x1", ... And the labels "y" of a file with one."""
    sizes, content = _sizes(source, file), source.content.reader(file)
    with zipfile.ZipFile(out, "w") as archive:
        for number, size in enumerate(sizes.tolist()):
            name = "x" if len(sizes) == 1 else f"x{number}"
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                _array_header(member, size, 1)
                _copy(source, member, content.chunks(size))
        if len(sizes) == 1:
            with archive.open(zipfile.ZipInfo("y.npy"), "w") as member:
                numpy.save(member, numpy.zeros(1, dtype=numpy.int64))


def _tfrecord(source: Source, file: DataFile, out: IO[bytes]) -> None:
    """Records of opaque bytes, with the checksums of TFRecord."""
    buffer = bytearray()
    content = source.content.reader(file)
    for size in _sizes(source, file).tolist():
        length = struct.pack("<Q", size)
        crc = 0
        buffer += length + _masked(crc32c(length))
        for chunk in content.chunks(size):
            crc = crc32c(chunk, crc)
            buffer += chunk
        buffer += _masked(crc)
        if len(buffer) >= _FLUSH_BYTES:
            source.check()
            out.write(buffer)
            buffer.clear()
    out.write(buffer)


def _masked(crc: int) -> bytes:
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _indexed_binary(
    source: Source, file: DataFile, out: IO[bytes], index: Callable[[str], IO[bytes]]
) -> None:
    """Samples of one size; beside them their offsets (.off.idx) and sizes (.sz.idx), 64 bits each."""
    [size] = _sizes(source, file, 1).tolist()
    samples = source.dataset.samples_per_file
    offsets, sizes = index(".off.idx"), index(".sz.idx")
    for first in range(0, samples, _FLUSH_BYTES):
        count = min(_FLUSH_BYTES, samples - first)
        offsets.write((numpy.arange(first, first + count, dtype="<u8") * numpy.uint64(size)).tobytes())
        sizes.write(numpy.full(count, size, dtype="<u8").tobytes())
    _copy(source, out, source.content.reader(file).chunks(size * samples))


def _parquet(source: Source, file: DataFile, out: IO[bytes]) -> None:
    """Row groups of uncompressed columns, as large as declared.

    So several values in one row, and integers that Parquet would store in 32 bits, are binary.
    """
    import pyarrow
    import pyarrow.parquet

    dataset = source.dataset
    columns: list[tuple[str, int, str]] = [
        (each.name, each.sample_bytes, each.dtype if each.size == 1 else "") for each in dataset.columns
    ] or [("data", max(1, round(dataset.record_bytes.mean)), "")]
    fields = [
        pyarrow.field(
            name, getattr(pyarrow, dtype)() if dtype in _PLAIN else pyarrow.binary(size), nullable=False
        )
        for name, size, dtype in columns
    ]
    schema = pyarrow.schema(fields)
    content = source.content.reader(file)
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    left = dataset.samples_per_file
    with pyarrow.parquet.ParquetWriter(out, schema, **options) as writer:
        while left:
            source.check()
            rows = min(left, dataset.rows_per_group)
            left -= rows
            buffers = [pyarrow.py_buffer(content.take(rows * size)) for _, size, _ in columns]
            arrays = [
                pyarrow.Array.from_buffers(field.type, rows, [None, buffer])
                for field, buffer in zip(fields, buffers, strict=True)
            ]
            writer.write_table(pyarrow.table(arrays, schema=schema), row_group_size=rows)
