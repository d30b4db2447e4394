"""Reads all tensors of safetensors files in their order, ahead of their use, in bounded memory."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from trunkline import _core
from trunkline._core import Engine, FileLayout, FileReader
from trunkline._errors import Cancelled
from trunkline._formats.file_version import Version
from trunkline._formats.safetensors.loader import Header, StoredTensor, Verify, checksums_of, load_files
from trunkline._progress import Progress
from trunkline._tensor_io.background import start_thread
from trunkline._tensor_io.flag import Flag
from trunkline._torch_or_numpy import torch

# What is read ahead is divided into batches: while one is used, the others are being read.
_BATCHES_READ = 3
_BATCHES = _BATCHES_READ + 1


@dataclass(frozen=True)
class ReadOptions:
    """How tensors are read: the arguments of load_files()."""

    device: torch.device
    engine: Engine | None
    verify: Verify


@dataclass(frozen=True)
class OpenFiles:
    """Files that tensors are read from."""

    headers: list[Header]  # with the tensors to read
    files: "list[_core.File]"
    until_read: ExitStack  # closes them

    def digest(self) -> str:
        """Return a text that is equal where the same tensors of equal headers are to be read."""
        digest = hashlib.sha256()
        for header in self.headers:
            digest.update(hashlib.sha256(header.head).digest())
            digest.update(repr((header.file_bytes, [each.name for each in header.tensors])).encode())
        return digest.hexdigest()

    def unchecked_versions(self) -> list[Version | None]:
        """Return the versions of the files whose headers have no checksums, and do not cover the data."""
        return [each.version for each in self.headers if checksums_of(each, "auto") is None]


def tensors_in_order(
    opened: OpenFiles, memory_bytes: int, options: ReadOptions
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of all files.

    `memory_bytes`: at most so much is read and not yet used, but at least one tensor. The files are closed at
    the end, or when the iterator is closed; no read is in flight then. Raises what load_files() raises.
    """
    with opened.until_read:
        waiting = batches_of(opened.headers, max(1, memory_bytes // _BATCHES))
        reading: list[_Batch] = []
        progress = Progress("reading tensors", sum(each.nbytes for each in waiting))
        try:
            for index, batch in enumerate(waiting):
                while len(reading) < _BATCHES_READ and index + len(reading) < len(waiting):
                    coming = waiting[index + len(reading)]
                    reading.append(_Batch(coming, opened.files[coming.file], options))
                    reading[-1].start()
                tensors = reading.pop(0).result()
                while tensors:
                    name = next(iter(tensors))
                    yield name, tensors.pop(name)
                progress.add(batch.nbytes)
        finally:
            progress.close()
            for each in reading:
                each.cancel()
            for each in reading:
                each.wait()


@dataclass(frozen=True)
class BatchOfTensors:
    """Tensors of one file that are read at once."""

    file: int  # index
    header: Header  # with only these tensors

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors."""
        return sum(each.end - each.begin for each in self.header.tensors)


def batches_of(headers: Sequence[Header], batch_bytes: int) -> list[BatchOfTensors]:
    """Divide the tensors, in their order, into batches of at most `batch_bytes`, or of one tensor."""
    batches: list[BatchOfTensors] = []
    for file, header in enumerate(headers):
        batch: list[StoredTensor] = []
        nbytes = 0
        for stored in header.tensors:
            size = stored.end - stored.begin
            if batch and nbytes + size > batch_bytes:
                batches.append(BatchOfTensors(file, replace(header, tensors=batch)))
                batch, nbytes = [], 0
            batch.append(stored)
            nbytes += size
        if batch:
            batches.append(BatchOfTensors(file, replace(header, tensors=batch)))
    return batches


class _Batch:
    """The tensors of a batch, read by a thread of its own."""

    def __init__(self, batch: BatchOfTensors, file: "_core.File", options: ReadOptions) -> None:
        self._header = batch.header
        self._file = file
        self._options = options
        self._tensors: dict[str, torch.Tensor] = {}
        self._error: BaseException | None = None
        self._done = Flag()
        self._is_cancelled = False
        self._reader: FileReader | None = None

    def start(self) -> None:
        start_thread(self._run, self._done)

    def result(self) -> dict[str, torch.Tensor]:
        """Wait for the tensors, in the order of their bytes. Raises the error of the read."""
        try:
            self._done.wait()
        except BaseException:  # of a signal handler
            self.cancel()
            self._done.wait()
            raise
        if self._error is not None:
            raise self._error
        return self._tensors

    def cancel(self) -> None:
        """Let the thread end soon."""
        self._is_cancelled = True
        if self._reader is not None:
            self._reader.cancel()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._done.wait()

    def _run(self) -> None:
        try:
            [self._tensors] = load_files(
                [self._header],
                [self._file],
                device=self._options.device,
                engine=self._options.engine,
                verify=self._options.verify,
                keep_open=True,
                read_layouts=self._read,
            )
        except BaseException as error:
            self._error = error

    def _read(
        self, layouts: Sequence[FileLayout], *, engine: Engine | None = None, verify: bool = True
    ) -> None:
        self._reader = FileReader(layouts, engine=engine, verify=verify, direct="unless_cached")
        if self._is_cancelled:  # before there was a reader to cancel
            raise Cancelled(None, "reading was cancelled")
        self._reader.run()
        self._reader = None  # it keeps the memory
