"""Samples that all have one size, which need no table: records, and rows of .npy files."""

from typing import TYPE_CHECKING, Any

import numpy
from numpy.lib import format as npy_format

from trunkline._errors import CutOff, Error, Format, Unsupported
from trunkline.data._listing import Listing
from trunkline.data._npy import NpyHeader, read_header
from trunkline.data._options import Options
from trunkline.data._scan_pool import scan_files
from trunkline.data._skipping import DAMAGE, Skipped

if TYPE_CHECKING:
    from numpy.typing import NDArray


def record_parts(
    listing: Listing, options: Options, skipped: Skipped
) -> "tuple[dict[str, Any], dict[str, NDArray[Any]]]":
    """Return the fields and arrays of an index of records."""
    assert options.record_bytes is not None
    record, stride, head = options.record_bytes, options.stride_bytes, options.header_bytes
    sizes = listing.sizes.astype(numpy.int64)
    room = sizes - head - record
    counts = numpy.where(room < 0, 0, room // (stride or record) + 1)
    if stride is None:
        ends = head + counts * record
        for file in numpy.flatnonzero(sizes != ends).tolist():
            path, size, end = listing.path(file), int(sizes[file]), int(ends[file])
            what = (
                f"its header of {head} bytes"
                if size < head
                else f"the record of {record} bytes at byte {end}"
            )
            message = f"{path} is truncated: it has {size} bytes, and ends within {what}; check record_bytes"
            skipped.add(path, min(end, size), CutOff(None, message, path))
    info = {"record_bytes": record, "stride_bytes": stride or record, "parameters": {"header_bytes": head}}
    return info, {
        "first_samples": first_samples(counts),
        "first_offsets": numpy.full(len(listing), head, numpy.uint64),
    }


def first_samples(counts: "NDArray[Any]") -> "NDArray[numpy.uint64]":
    """Return the number of the first sample of each file, and of all samples."""
    firsts = numpy.zeros(len(counts) + 1, numpy.uint64)
    numpy.cumsum(counts, out=firsts[1:])
    return firsts


def npy_parts(
    listing: Listing, options: Options, skipped: Skipped
) -> "tuple[dict[str, Any], dict[str, NDArray[Any]]]":
    """Return the fields and arrays of an index of rows."""

    def scan(file: int) -> NpyHeader | Error:
        try:
            return _rows_header(listing.path(file), int(listing.sizes[file]))
        except DAMAGE as error:
            return error

    counts = numpy.zeros(len(listing), numpy.int64)
    offsets = numpy.zeros(len(listing), numpy.uint64)
    first: tuple[str, NpyHeader] | None = None
    for file, header in scan_files(range(len(listing)), scan, options):
        path = listing.path(file)
        if not isinstance(header, Error):
            first = first or (path, header)
            header = _same_rows(path, header, *first)
        if isinstance(header, Error):
            skipped.add(path, 0, header)
            continue
        counts[file] = header.shape[0]
        offsets[file] = header.data_offset
    if first is None:
        raise Format(
            None, f"none of the {len(listing)} files could be indexed; the first is {listing.path(0)}"
        )
    dtype, shape = first[1].dtype, first[1].shape[1:]
    row = dtype.itemsize * int(numpy.prod(shape, dtype=object))
    return {
        "record_bytes": row,
        "stride_bytes": row,
        "dtype": repr(npy_format.dtype_to_descr(dtype)),
        "row_shape": shape,
    }, {"first_samples": first_samples(counts), "first_offsets": offsets}


def _rows_header(path: str, size: int) -> NpyHeader:
    header = read_header(path, size)
    if not header.shape:
        raise Unsupported(None, f"{path}: holds a scalar, which has no rows", path)
    if header.fortran_order:
        raise Unsupported(
            None,
            f"{path}: its array is in Fortran order, in which rows are not contiguous; save "
            "numpy.ascontiguousarray(array)",
            path,
        )
    if header.dtype.itemsize * int(numpy.prod(header.shape[1:], dtype=object)) == 0:
        raise Unsupported(None, f"{path}: its rows have no bytes: {header.dtype} {list(header.shape)}", path)
    return header


def _same_rows(path: str, header: NpyHeader, first_path: str, first: NpyHeader) -> NpyHeader | Error:
    if (header.dtype, header.shape[1:]) == (first.dtype, first.shape[1:]):
        return header
    return Format(
        None,
        f"{path}: has rows of {header.dtype} {list(header.shape[1:])}, but those of {first_path} are "
        f"{first.dtype} {list(first.shape[1:])}; index them separately",
        path,
    )
