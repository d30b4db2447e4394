"""The functions of DeepSpeed's op async_io: whole files, and a copy."""

from pathlib import Path

import torch

from trunkline.deepspeed._operation import Operation


def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Read a whole file into a tensor of the same number of bytes; return 0.

    Raises ValueError if the sizes differ, OSError if reading fails. The arguments after `filename` but for
    `validate` have no effect, see aio_handle.
    """
    size = Path(filename).stat().st_size
    if size != buffer.nbytes:
        raise ValueError(f"aio_read: {filename} has {size} bytes, and the tensor {buffer.nbytes}")
    Operation.read(buffer, filename, 0).finish(validate=validate)
    return 0


def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write a tensor to the begin of a file, which is made if there is none; return 0. Raises OSError."""
    Operation.write(buffer, filename, 0).finish(validate=validate)
    return 0


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy one tensor into another of the same number of elements; return 0."""
    if dest.numel() != src.numel():
        raise ValueError(f"deepspeed_memcpy: dest has {dest.numel()} elements, and src {src.numel()}")
    dest.detach().copy_(src.detach().reshape(dest.shape))
    return 0
