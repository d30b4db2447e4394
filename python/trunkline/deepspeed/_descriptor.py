"""Writing to a descriptor whose file this process may not open again."""

import os
import threading
from concurrent.futures import Future

import torch

from trunkline._errors import system_error

_WRITTEN_BYTES = 1 << 30  # at a time: the kernel writes at most 2 GiB


class DescriptorFile:
    """An open file, written by a thread of its own through the page cache, or as it was opened."""

    def __init__(self, fd: int) -> None:
        """Copy the descriptor, which the caller may close. Raises OSError."""
        self._name = f"the file descriptor {fd}"
        self._fd = os.dup(fd)

    def async_pwrite(self, memory: torch.Tensor, offset: int) -> "Future[int]":
        """Begin to write contiguous memory."""
        data = memory.to("cpu").reshape(-1).view(torch.uint8).numpy().data
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()

        def write() -> None:
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(self._fd, data[done : done + _WRITTEN_BYTES], offset + done)
                future.set_result(done)
            except OSError as error:
                future.set_exception(system_error(error, f"write to {self._name}", self._name))

        threading.Thread(target=write, name="trunkline-pwrite", daemon=False).start()
        return future

    def close(self) -> None:
        """Close the copy."""
        os.close(self._fd)
