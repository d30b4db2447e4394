"""Tensors that are stored somewhere, and how they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from trunkline._core import File, FileLayout
from trunkline._errors import Corrupt
from trunkline._formats.safetensors.loader import Header, dtype_and_shape
from trunkline._tensor_io import transfer
from trunkline._tensor_io.memory import CPU, empty_bytes, is_fresh

# A unit of WeightStream: its name, bytes of memory, and parts of (file, offset, bytes, at, CRC-32C).
StreamUnit: TypeAlias = tuple[str, int, list[tuple[int, int, int, int, int | None]]]

TENSOR_ALIGNMENT = 64  # as torch aligns its own: some kernels round differently elsewhere


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `file` is its index among some files, `offset` counts bytes from its start."""

    name: str
    file: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int | None = None  # CRC-32C

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def misalignment(self) -> int:
        """Where a tensor in the mapped file begins, counted from TENSOR_ALIGNMENT; 0 where no view could."""
        found = self.offset % TENSOR_ALIGNMENT
        return found if found % self.dtype.itemsize == 0 else 0


def of_headers(headers: Sequence[Header]) -> dict[str, Stored]:
    """Return the tensors of safetensors files by name; `file` counts the headers."""
    return {
        stored.name: Stored(stored.name, index, stored.begin, *dtype_and_shape(stored, header.path))
        for index, header in enumerate(headers)
        for stored in header.tensors
    }


def read(
    tensors: Sequence[Stored], files: Sequence[File], paths: Sequence[str], device: torch.device = CPU
) -> list[torch.Tensor]:
    """Read tensors into memory of their own, all at once, and compare those that have a checksum with it.

    They have the alignment there that they have in the file, on a GPU that of its allocator. The files are
    closed. Raises Corrupt, with `tensor`, for one that differs.
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
