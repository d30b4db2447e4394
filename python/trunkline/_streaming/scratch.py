"""Memory in which the quantised weights of a unit are dequantised, one unit at a time."""

from typing import Protocol

import torch

from trunkline._tensor_io.memory import empty_bytes


class Owner(Protocol):
    """A unit whose dequantised weights are in the memory."""

    def lose_scratch(self) -> None:
        """Put the offloaded weights back in place of those that are about to be overwritten."""


class Scratch:
    """The memory. `owner`: the unit whose weights all of it holds; None while it is being written."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """`nbytes`: of the largest unit."""
        self._bytes = empty_bytes(nbytes, device)
        self.owner: Owner | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._bytes.nbytes

    def take(self) -> None:
        """Take the memory from its owner, before other weights are written there."""
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.lose_scratch()

    def release(self, owner: Owner) -> None:
        """Note that this unit no longer uses the memory."""
        if self.owner is owner:
            self.owner = None

    def view(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor that begins at this byte."""
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        return self._bytes[begin : begin + nbytes].view(dtype).reshape(shape)
