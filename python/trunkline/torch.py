"""Torch tensors in pinned memory, into which files are read without a copy."""

from collections.abc import Sequence
from math import prod

import torch

from trunkline._core import Engine, pinned_empty

__all__ = ["empty_pinned"]


def empty_pinned(
    shape: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    engine: Engine | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """Make a CPU tensor of zeros in page-aligned memory, locked where RLIMIT_MEMLOCK allows, without a GPU.

    If the process already uses a GPU, the memory is also registered with the CUDA driver, and copies to and
    from GPUs are asynchronous; `device` "cuda" or "cuda:1" requires that, "cpu" skips it (see pinned_empty).
    `shape` is in elements of `dtype`. The memory counts towards the engine's pinned_budget_bytes (None: the
    default engine's) until the last tensor that shares it is deleted. Raises OutOfBudget if it does not fit,
    ValueError for a negative shape, TypeError for another dtype. Thread-safe.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: must be a torch.dtype such as torch.bfloat16, not {dtype!r}")
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape: must have no negative extent, not {extents}")
    nbytes = prod(extents) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(extents, dtype=dtype, device="cpu")
    buffer = pinned_empty(nbytes, device, engine=engine)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(extents)
