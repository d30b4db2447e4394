"""Memory for weights while SGLang loads them: pages of a file without a name, which leave memory soon."""

import mmap
import os
import tempfile
import threading
from pathlib import Path
from types import TracebackType

import torch

_TRIM_SECONDS = 0.2


class LoadingMemory:
    """Tensors in a temporary file of a directory, so that not all of them must be in memory at once.

    The file has no name and ends with the process. Memory that was written stays mapped for a moment only.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, prefix=".trunkline-loading-")  # noqa: SIM115
        self._mapped: list[mmap.mmap] = []
        self._nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._trim, name="trunkline-loading", daemon=True)
        self._thread.start()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of zeros with the shape and dtype of another one, in the file."""
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            return torch.empty_like(tensor)
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        begin, self._nbytes = self._nbytes, self._nbytes + room
        os.posix_fallocate(self._file.fileno(), begin, room)  # a full disk is an error here, not SIGBUS later
        memory = mmap.mmap(self._file.fileno(), room, offset=begin)
        self._mapped.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(tensor.dtype).reshape(tensor.shape)

    def __enter__(self) -> "LoadingMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the file back; tensors that still exist keep it."""
        self._stop.set()
        self._thread.join()
        self._mapped.clear()
        self._file.close()

    def _trim(self) -> None:
        while not self._stop.wait(_TRIM_SECONDS):
            for memory in list(self._mapped):
                memory.madvise(mmap.MADV_DONTNEED)  # the file keeps what was written
