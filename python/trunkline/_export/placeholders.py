"""Tensors without contents: addresses that stand for bytes in files."""

import bisect
import errno
import mmap
from collections.abc import Sequence

import torch

from trunkline._errors import Error

_ALIGNMENT = 4096
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 does not name it


class Placeholders:
    """Address space for tensors of the given sizes, none of which is ever touched.

    A state can be built of them, and pickled, as of the tensors that they stand for: the address of a storage
    shows which one it is.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Reserve the addresses. Raises Error (ENOMEM) where the process may not have as many."""
        self._begins: list[int] = []
        total = 0
        for nbytes in sizes:
            self._begins.append(total)
            total += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._sizes = list(sizes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._memory = mmap.mmap(-1, max(total, 1), flags=flags)
        except (OSError, OverflowError):
            raise Error(
                errno.ENOMEM,
                f"cannot reserve {total} bytes of addresses for the tensors of the state, although none of "
                "them is used as memory: raise the limit (ulimit -v, vm.overcommit_memory), or export a part "
                "of the state (key=)",
            ) from None
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def tensor(self, index: int) -> torch.Tensor:
        """Return a placeholder, flat, of uint8, with a storage of its own."""
        if self._sizes[index] == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self._sizes[index], offset=self._begins[index]
        )

    def find(self, address: int) -> tuple[int, int] | None:
        """Return which placeholder has the address, and the offset in it; None for any other memory."""
        offset = address - self._address
        index = bisect.bisect_right(self._begins, offset) - 1
        if index < 0 or offset - self._begins[index] >= self._sizes[index]:
            return None
        return index, offset - self._begins[index]
