"""Reads safetensors files once, tensor by tensor and ahead of use, and computes checksums of their data."""

import os
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch

from trunkline import _core
from trunkline._core import File, Future, crc32c, crc32c_combine
from trunkline._formats.safetensors.loader import Header
from trunkline._progress import Progress
from trunkline._streaming.stored import FileTensor

_READ_AHEAD_BYTES = 128 << 20  # read before they are needed, or the next tensor if it is larger
_CHUNK_BYTES = 64 << 20  # of data that belongs to no tensor that was fetched


class Source:
    """The files behind `headers`; `wanted` are their tensors in the order of use. One thread may use it."""

    def __init__(self, headers: Sequence[Header], wanted: Iterable[FileTensor] = ()) -> None:
        self._headers = headers
        self._files = [_core.open(header.path) for header in headers]
        self._next = iter(wanted)
        self._in_flight: dict[str, tuple[torch.Tensor, Future]] = {}
        self._ahead_bytes = 0
        self._checksums: list[dict[int, tuple[int, int]]] = [{} for _ in headers]  # by offset: end, CRC-32C
        self._send()

    def __enter__(self) -> "Source":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def fetch(self, stored: FileTensor) -> torch.Tensor:
        """Return a tensor as it is stored. Raises the error of the read."""
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if stored.name in self._in_flight:
            memory, future = self._in_flight.pop(stored.name)
            future.result()
            self._ahead_bytes -= stored.nbytes
        else:
            memory = torch.empty(stored.nbytes, dtype=torch.uint8)
            self._files[stored.file].pread(memory, stored.offset)
        self._send()
        self._checksums[stored.file][stored.offset] = stored.offset + stored.nbytes, crc32c(memory)
        return memory.view(stored.dtype).reshape(stored.shape)

    def data_checksums(self) -> list[int]:
        """Return the CRC-32C of all data of each file; reads what was not fetched."""
        return [self._data_checksum(index) for index in range(len(self._headers))]

    def _send(self) -> None:
        while self._ahead_bytes < _READ_AHEAD_BYTES:
            stored = next(self._next, None)
            if stored is None:
                return
            if stored.nbytes == 0 or stored.name in self._in_flight:
                continue
            memory = torch.empty(stored.nbytes, dtype=torch.uint8)
            future = self._files[stored.file].async_pread(memory, stored.offset)
            self._in_flight[stored.name] = memory, future
            self._ahead_bytes += stored.nbytes

    def _data_checksum(self, index: int) -> int:
        header, checksums = self._headers[index], self._checksums[index]
        checksum, at = 0, len(header.head)
        for begin in (*sorted(checksums), header.file_bytes):
            checksum = _checksum(self._files[index], at, begin, checksum)
            if begin < header.file_bytes:
                at, of_tensor = checksums[begin]
                checksum = crc32c_combine(checksum, of_tensor, at - begin)
        return checksum


def _checksum(file: File, begin: int, end: int, checksum: int) -> int:
    """Extend `checksum`, a CRC-32C, by a range of the file, read with two requests in flight."""
    memory = [torch.empty(min(_CHUNK_BYTES, end - begin), dtype=torch.uint8) for _ in range(2)]
    chunks = [(at, min(_CHUNK_BYTES, end - at)) for at in range(begin, end, _CHUNK_BYTES)]

    def send(index: int) -> Future:
        at, nbytes = chunks[index]
        return file.async_pread(memory[index % 2][:nbytes], at)

    progress = Progress(f"computing the checksum of {os.path.basename(file.path)}", end - begin)  # noqa: PTH119
    try:
        in_flight = [send(index) for index in range(min(2, len(chunks)))]
        for index, (_, nbytes) in enumerate(chunks):
            in_flight[index].result()
            checksum = crc32c(memory[index % 2][:nbytes], checksum)
            if index + 2 < len(chunks):
                in_flight.append(send(index + 2))
            progress.add(nbytes)
    finally:
        progress.close()
    return checksum
