"""Memory that ranks of one machine share: each has some, which the others read."""

import mmap
import os
from contextlib import suppress
from typing import Any

import torch

from trunkline._boot_id import boot_id
from trunkline._errors import Error


class NodeMemory:
    """Memory of this rank and, once opened, of others on the machine. It is freed when no process uses it."""

    def __init__(self, allocated: int, nbytes: int) -> None:
        """Make `nbytes`, of which the first `allocated` are allocated now, the others when they are used.

        Raises Error if there is no memory.
        """
        self._descriptor = os.memfd_create("trunkline-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, nbytes)
            os.posix_fallocate(self._descriptor, 0, allocated)
        except OSError as error:
            os.close(self._descriptor)
            raise Error(
                error.errno, f"no memory for {allocated} bytes that ranks share; pass a smaller memory_bytes"
            ) from None
        self._nbytes = nbytes
        self.own = self._map(self._descriptor)
        self._opened: dict[int, torch.Tensor] = {}

    def address(self) -> dict[str, Any]:
        """Return what open() of another rank needs."""
        status = os.fstat(self._descriptor)
        return {
            # Process numbers mean the same in one namespace of one running kernel only.
            "kernel": boot_id(),
            "processes": os.readlink("/proc/self/ns/pid"),  # noqa: PTH115
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "inode": (status.st_dev, status.st_ino),
            "nbytes": self._nbytes,
        }

    def open(self, rank: int, address: dict[str, Any]) -> bool:
        """Map the memory of another rank. Returns False if it is on another machine, or of another user."""
        mine = self.address()
        if any(address[name] != mine[name] for name in ("kernel", "processes")):
            return False
        with suppress(OSError):
            descriptor = os.open(f"/proc/{address['process']}/fd/{address['descriptor']}", os.O_RDWR)
            try:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) == tuple(address["inode"]):
                    self._opened[rank] = self._map(descriptor, address["nbytes"])
                    return True
            finally:
                os.close(descriptor)
        return False

    def of(self, rank: int) -> torch.Tensor:
        """Return the memory of a rank that was opened, as bytes."""
        return self._opened[rank]

    def close(self) -> None:
        """Close the descriptor; memory is freed with the last tensor that uses it."""
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def _map(self, descriptor: int, nbytes: int | None = None) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(descriptor, nbytes or self._nbytes), dtype=torch.uint8)
