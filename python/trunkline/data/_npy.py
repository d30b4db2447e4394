"""Headers of .npy files, parsed by numpy.lib.format."""

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy
from numpy.lib import format as npy_format

from trunkline._errors import Corrupt, CutOff, Format, Unsupported
from trunkline._parsing import parsed

_MAX_HEADER_BYTES = 10_000  # numpy accepts no longer ones without being told to


@dataclass(frozen=True)
class NpyHeader:
    """The array that a .npy file holds."""

    dtype: "numpy.dtype[Any]"
    shape: tuple[int, ...]
    fortran_order: bool
    data_offset: int  # bytes from the file's start

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return _product(self.shape) * self.dtype.itemsize


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def head_bytes(start: bytes, name: str) -> int:
    """Return the size of magic and header from the first 12 bytes. Raises Format, CutOff."""
    if len(start) < 12:
        raise CutOff(None, f"{name}: ends within the header of a .npy file, at byte {len(start)}", name)
    if start[:6] != npy_format.MAGIC_PREFIX:
        raise Format(
            None, f"{name}: is not a .npy file: it does not begin with {npy_format.MAGIC_PREFIX!r}", name
        )
    version = (start[6], start[7])
    if version == (1, 0):
        return 10 + int.from_bytes(start[8:10], "little")
    if version in ((2, 0), (3, 0)):
        length = int.from_bytes(start[8:12], "little")
        if length > _MAX_HEADER_BYTES:
            raise Format(
                None, f"{name}: its .npy header has {length} bytes; at most {_MAX_HEADER_BYTES}", name
            )
        return 12 + length
    raise Unsupported(
        None, f"{name}: version {version[0]}.{version[1]} of the .npy format is not supported", name
    )


def parse_head(head: bytes, name: str) -> NpyHeader:
    """Parse magic and header. Raises Format, CutOff, and Unsupported for arrays of objects."""
    if len(head) < head_bytes(head[:12], name):
        raise CutOff(None, f"{name}: ends within the header of a .npy file, at byte {len(head)}", name)
    try:
        shape, fortran_order, dtype, data_offset = parsed(lambda: _parsed_by_numpy(head))
    except Exception as error:  # numpy parses it as Python, whose errors are of many types
        raise Format(None, f"{name}: its .npy header cannot be parsed: {error}", name) from None
    if dtype.hasobject:
        raise Unsupported(
            None,
            f"{name}: holds Python objects ({dtype}), which only pickle can read; save an array of numbers",
            name,
        )
    if dtype.subdtype is not None:
        raise Format(None, f"{name}: the dtype in its .npy header is of arrays: {dtype}", name)
    if any(type(extent) is not int or extent < 0 for extent in shape):  # numpy lets a bool pass
        raise Format(
            None,
            f"{name}: the shape in its .npy header is not one of non-negative integers: {list(shape)}",
            name,
        )
    return NpyHeader(dtype, tuple(shape), fortran_order and len(shape) > 1, data_offset)


def _parsed_by_numpy(head: bytes) -> "tuple[tuple[int, ...], bool, numpy.dtype[Any], int]":
    """Return shape, Fortran order, dtype, and where the data begins."""
    file = io.BytesIO(head)
    version = npy_format.read_magic(file)
    if version == (1, 0):
        return (*npy_format.read_array_header_1_0(file), file.tell())
    # Version 3.0 differs in the encoding of the names of fields alone.
    if version == (3, 0):
        text = head[12:].decode("utf-8")
        file = io.BytesIO(npy_format.magic(2, 0) + head[8:12] + text.encode("latin1"))
        npy_format.read_magic(file)
    return (*npy_format.read_array_header_2_0(file), file.tell())


def read_header(path: str, size: int) -> NpyHeader:
    """Read the header of a .npy file of `size` bytes. Raises OSError; see parse_head."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        start = file.read(12)
        head = start + (file.read(head_bytes(start, path) - 12) or b"")
    header = parse_head(head, path)
    if header.data_offset + header.nbytes > size:
        raise CutOff(
            None,
            f"{path}: has {size} bytes, but its array {header.dtype} {list(header.shape)} ends at byte "
            f"{header.data_offset + header.nbytes}: the file is truncated",
            path,
        )
    return header


def array_of(memory: "memoryview", header: NpyHeader, name: str) -> "numpy.ndarray[Any, Any]":
    """Return the array in the memory of a whole .npy file, without a copy. Raises CutOff, Corrupt."""
    data = memory[header.data_offset :]
    if len(data) != header.nbytes:
        kind = CutOff if len(data) < header.nbytes else Corrupt
        raise kind(
            None, f"{name}: holds {len(data)} bytes of data, but its header says {header.nbytes}", name
        )
    order: Literal["F", "C"] = "F" if header.fortran_order else "C"
    try:
        if not header.nbytes:
            return numpy.empty(header.shape, header.dtype, order)
        return numpy.frombuffer(data, numpy.uint8).view(header.dtype).reshape(header.shape, order=order)
    except (ValueError, OverflowError, MemoryError) as error:
        raise Format(None, f"{name}: an array {header.dtype} {list(header.shape)}: {error}", name) from None
