"""Tensors in files, and how they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from trunkline._core import File, FileLayout
from trunkline._errors import Corrupt
from trunkline._formats.safetensors.loader import Header, dtype_and_shape
from trunkline._streaming.roofline import PAGE_BYTES
from trunkline._tensor_io import transfer
from trunkline._tensor_io.memory import CPU, empty_bytes, is_fresh

# A unit of WeightStream: its name, bytes of memory, and parts of (file, offset, bytes, at, CRC-32C).
StreamUnit: TypeAlias = tuple[str, int, list[tuple[int, int, int, int, int | None]]]

TENSOR_ALIGNMENT = 64  # what torch uses; with another alignment some kernels round differently


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: `file` is an index into a list of files, `offset` counts bytes from its start."""

    name: str
    file: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int | None = None  # CRC-32C
    slices: int = 0  # if it is used in slices of its first dimension: how many
    slice_checksums: tuple[int, ...] = ()  # CRC-32C of each

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def misalignment(self) -> int:
        """Its offset modulo TENSOR_ALIGNMENT; 0 if the dtype could not be viewed there in a mapped file."""
        return self.offset % TENSOR_ALIGNMENT if self.is_viewable else 0

    @property
    def is_viewable(self) -> bool:
        """Whether its dtype can be viewed in memory that is aligned as the file is."""
        return self.offset % self.dtype.itemsize == 0

    def next_begin(self, at: int) -> int:
        """Return the first byte from `at` on where it may begin in memory that begins with a page.

        That is where it is read without a copy; if its dtype cannot be viewed there, an aligned one.
        """
        if self.is_viewable:
            return at + (self.offset - at) % PAGE_BYTES
        return at + -at % TENSOR_ALIGNMENT

    def slice(self, index: int) -> "FileTensor":
        """Return one element of the first dimension."""
        shape = self.shape[1:]
        nbytes = prod(shape) * self.dtype.itemsize
        checksum = self.slice_checksums[index] if self.slice_checksums else None
        return FileTensor(
            f"{self.name}[{index}]", self.file, self.offset + index * nbytes, self.dtype, shape, checksum
        )

    def elements(self, which: range) -> "FileTensor":
        """Return adjacent elements of the first dimension, without a checksum."""
        shape = self.shape[1:]
        at = self.offset + which.start * prod(shape) * self.dtype.itemsize
        name = f"{self.name}[{which.start}:{which.stop}]"
        return FileTensor(name, self.file, at, self.dtype, (len(which), *shape))


def of_headers(headers: Sequence[Header]) -> dict[str, FileTensor]:
    """Return the tensors of safetensors files by name; `file` is an index into `headers`."""
    return {
        stored.name: FileTensor(stored.name, index, stored.begin, *dtype_and_shape(stored, header.path))
        for index, header in enumerate(headers)
        for stored in header.tensors
    }


def read(
    tensors: Sequence[FileTensor], files: Sequence[File], paths: Sequence[str], device: torch.device = CPU
) -> list[torch.Tensor]:
    """Read tensors into new memory, all at once, and verify those that have a checksum.

    They are aligned in memory as in the file; on a GPU as by its allocator. Closes the files. Raises Corrupt,
    with the attribute `tensor`, for one whose checksum differs.
    """
    shifts = [stored.misalignment if device.type == "cpu" else 0 for stored in tensors]
    sizes = [shift + stored.nbytes for shift, stored in zip(shifts, tensors, strict=True)]
    made = [empty_bytes(nbytes, device)[shift:] for shift, nbytes in zip(shifts, sizes, strict=True)]
    layouts: dict[int, FileLayout] = {}
    names: dict[int, list[str]] = {}
    for stored, memory, nbytes in sorted(
        zip(tensors, made, sizes, strict=True), key=lambda each: (each[0].file, each[0].offset)
    ):
        if stored.nbytes == 0:
            continue
        layout = layouts.get(stored.file)
        if layout is None:
            layout = layouts[stored.file] = FileLayout(paths[stored.file], files[stored.file].size)
            layout.read_from(files[stored.file])
            names[stored.file] = []
        layout.add_target(stored.offset, memory, fresh=is_fresh(nbytes))
        if stored.checksum is not None:
            layout.add_checksum("crc32c", stored.offset, stored.offset + stored.nbytes, stored.checksum)
            names[stored.file].append(stored.name)
    try:
        transfer.read_layouts(list(layouts.values()))
    except Corrupt as error:
        layout_index, which = getattr(error, "layout", None), getattr(error, "checksum", None)
        if layout_index is not None and which is not None:
            error.tensor = list(names.values())[layout_index][which]
        raise
    return [
        memory.view(stored.dtype).reshape(stored.shape) for stored, memory in zip(tensors, made, strict=True)
    ]
