"""Slices of a stored tensor: the bytes that they need, in C order. Pure functions."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from trunkline._torch_or_numpy import torch

# Rows that a slice reads one by one; of more, all between the first and the last is read.
_MAX_RUNS = 1 << 20

Offsets: TypeAlias = "numpy.ndarray[Any, numpy.dtype[numpy.int64]]"


class Block(NamedTuple):
    """A rectangular part of a tensor, and the index that makes the slice of it."""

    begin: tuple[int, ...]  # for each dimension
    shape: tuple[int, ...]
    rest: tuple[Any, ...]  # an index of slices and integers


def block_of(index: Any, shape: Sequence[int]) -> Block:
    """Return the smallest block that has all elements of tensor[index].

    Raises TypeError for an index of anything but integers, slices and an Ellipsis, IndexError for one outside
    of the shape.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    _check(parts, len(shape))
    if any(part is Ellipsis for part in parts):
        at = next(number for number, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    begins: list[int] = []
    extents: list[int] = []
    rest: list[Any] = []
    for dimension, (part, extent) in enumerate(zip(parts, shape, strict=True)):
        if not isinstance(part, slice):
            number = part.__index__()
            if not -extent <= number < extent:
                raise IndexError(
                    f"index {number} is out of bounds for dimension {dimension} of size {extent}"
                )
            begins.append(number % extent)
            extents.append(1)
            rest.append(0)
            continue
        start, stop, step = part.indices(extent)
        if step < 1:
            raise ValueError(f"index: the step of a slice must be positive, as torch requires, not {step}")
        count = max(0, -(-(stop - start) // step))
        begins.append(start if count else 0)
        extents.append((count - 1) * step + 1 if count else 0)
        rest.append(slice(None, None, step))
    return Block(tuple(begins), tuple(extents), tuple(rest))


def _check(parts: Sequence[Any], dimensions: int) -> None:
    ellipses = sum(part is Ellipsis for part in parts)
    for part in parts:
        is_number = not isinstance(part, bool | numpy.bool_) and hasattr(part, "__index__")
        if isinstance(part, torch.Tensor | numpy.ndarray) or not (
            isinstance(part, slice) or part is Ellipsis or is_number
        ):
            raise TypeError(
                "index: must consist of integers, slices and an Ellipsis, not "
                f"{type(part).__name__}; load the tensor, then index it"
            )
    if ellipses > 1:
        raise IndexError("index: can have only one Ellipsis")
    if len(parts) - ellipses > dimensions:
        raise IndexError(
            f"index: has {len(parts) - ellipses} parts, but the tensor has {dimensions} "
            f"dimension{'' if dimensions == 1 else 's'}"
        )


class Runs(NamedTuple):
    """Ranges of bytes of a tensor, each of `nbytes`, which one after the other are a block."""

    offsets: Offsets
    nbytes: int


def runs_of(block: Block, shape: Sequence[int], itemsize: int) -> Runs | None:
    """Return where the bytes of a block are; None for too many pieces: read the whole tensor then."""
    if math.prod(block.shape) == 0:
        return Runs(numpy.zeros(0, numpy.int64), 0)
    inner = len(shape)  # dimensions from here on are taken whole
    while inner > 0 and block.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)  # those before are visited one by one
    if math.prod(block.shape[:outer]) > _MAX_RUNS:
        return None
    steps = [itemsize * math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    offsets = numpy.zeros(1, numpy.int64)
    for dimension in range(outer):
        own = (block.begin[dimension] + numpy.arange(block.shape[dimension], dtype=numpy.int64)) * steps[
            dimension
        ]
        offsets = (offsets[:, None] + own).reshape(-1)
    within = sum(block.begin[dimension] * steps[dimension] for dimension in range(outer, len(shape)))
    return Runs(offsets + within, itemsize * math.prod(block.shape[outer:]))
