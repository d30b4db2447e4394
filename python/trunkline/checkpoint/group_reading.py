"""Iterates over the tensors of safetensors files, which the ranks of a process group read together."""

import queue
import threading
from collections.abc import Iterator, Sequence

import torch

from trunkline._core import crc32c
from trunkline._formats.file_version import check_unchanged
from trunkline._formats.safetensors import Header
from trunkline._formats.safetensors.loader import checksums_of, corrupt_chunk, empty_tensor
from trunkline._formats.safetensors.pieces import Piece
from trunkline._formats.safetensors.read_ahead import OpenFiles, ReadOptions
from trunkline._tensor_io.background import start_thread
from trunkline.checkpoint.group_rounds import SLOTS, Rounds, cut_for_ranks
from trunkline.checkpoint.reading_ranks import ReadingRanks


def tensors_of_group(
    ranks: ReadingRanks, opened: OpenFiles, memory_bytes: int, options: ReadOptions
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of all files on every rank; the ranks must have opened the same.

    Raises what tensors_in_order() raises where this rank reads, and RankError if another rank fails, or has
    ended its loop early. Closes `ranks` and the files when it ends.
    """
    return _GroupTensors(_Reading(ranks, opened, memory_bytes, options))


class _GroupTensors:
    """An iterator whose reading begins when it is made, since other ranks wait for this one."""

    def __init__(self, reading: "_Reading") -> None:
        self._reading = reading
        self._results = reading.results()
        start_thread(reading.run)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._results)

    def close(self) -> None:
        """End early."""
        self._results.close()  # type: ignore[attr-defined]
        self._reading.stop()

    def __del__(self) -> None:
        self._reading.stop()


class _Reading:
    """Reads in a thread, which talks to the other ranks."""

    def __init__(
        self, ranks: ReadingRanks, opened: OpenFiles, memory_bytes: int, options: ReadOptions
    ) -> None:
        self._ranks = ranks
        self._opened = opened
        self._sums = [checksums_of(header, options.verify) for header in opened.headers]
        grains = [1 if sums is None else sums.chunk_bytes for sums in self._sums]
        pieces = cut_for_ranks(opened.headers, ranks.size, memory_bytes, grains)
        self._rounds = Rounds(ranks, opened.files, pieces, self)
        self._tensors = _Tensors(opened.headers, options.device)
        self._results = _Results(max(1, memory_bytes - SLOTS * self._rounds.slot_bytes))

    def results(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._results.take()

    def stop(self) -> None:
        """Let the thread end: at its next meeting with the other ranks."""
        self._results.close()

    def run(self) -> None:
        """The thread."""
        error: BaseException | None = None
        try:
            with self._opened.until_read:
                self._put_finished()
                self._rounds.run()
        except BaseException as failed:
            error = failed
        finally:
            self._ranks.close()
            self._results.end(error)

    def _put_finished(self) -> None:
        for name, tensor in self._tensors.finished():
            self._results.put(name, tensor)

    def verify(self, piece: Piece, contents: torch.Tensor) -> None:
        """Verify chunks by their checksums."""
        sums = self._sums[piece.file]
        header = self._opened.headers[piece.file]
        if sums is None:
            check_unchanged(header.path, header.version)
            return
        first = (piece.begin - len(header.head)) // sums.chunk_bytes
        for chunk, begin in enumerate(range(0, piece.nbytes, sums.chunk_bytes), first):
            if crc32c(contents[begin : begin + sums.chunk_bytes]) != sums.values[chunk]:
                raise corrupt_chunk(header, sums, chunk)

    def use(self, piece: Piece, contents: torch.Tensor, verified: None) -> None:
        """Fill tensors, and hand out those that are complete."""
        self._tensors.fill(piece, contents)
        self._put_finished()

    def stop_reason(self) -> str | None:
        return "its loop over the tensors has ended early" if self._results.is_closed() else None


class _Tensors:
    """The tensors, which are filled in their order."""

    def __init__(self, headers: Sequence[Header], device: torch.device) -> None:
        self._stored = [(header.path, stored) for header in headers for stored in header.tensors]
        self._missing = [stored.end - stored.begin for _, stored in self._stored]
        self._device = device
        self._filling: dict[int, torch.Tensor] = {}
        self._next = 0

    def fill(self, piece: Piece, contents: torch.Tensor) -> None:
        for part in piece.parts:
            tensor = self._filling.get(part.tensor)
            if tensor is None:
                tensor = self._filling[part.tensor] = self._empty(part.tensor)
            into = tensor.reshape(-1).view(torch.uint8)[part.begin : part.begin + part.nbytes]
            into.copy_(contents[part.at : part.at + part.nbytes])
            self._missing[part.tensor] -= part.nbytes

    def finished(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are complete now."""
        while self._next < len(self._stored) and self._missing[self._next] == 0:
            index = self._next
            self._next += 1
            tensor = self._filling.pop(index, None)
            yield self._stored[index][1].name, self._empty(index) if tensor is None else tensor

    def _empty(self, index: int) -> torch.Tensor:
        path, stored = self._stored[index]
        return empty_tensor(stored, path, self._device)


class _Results:
    """Tensors on their way from the thread to the loop, of at most so many bytes. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._queue: queue.SimpleQueue[tuple[str, torch.Tensor] | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._nbytes = 0
        self._closed = False
        self._error: BaseException | None = None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Wait until there is room, or nobody takes any."""
        with self._condition:
            while not self._closed and self._nbytes > 0 and self._nbytes + tensor.nbytes > self._most_bytes:
                self._condition.wait()
            self._nbytes += tensor.nbytes
        self._queue.put((name, tensor))

    def end(self, error: BaseException | None) -> None:
        """There are no more; `error`: why."""
        self._error = error
        self._queue.put(None)

    def take(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors. Raises the error after the last."""
        while (found := self._queue.get()) is not None:
            with self._condition:
                self._nbytes -= found[1].nbytes
                self._condition.notify()
            yield found
            del found
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let put() no longer wait."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def is_closed(self) -> bool:
        return self._closed
