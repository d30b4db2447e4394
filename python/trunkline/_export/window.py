"""Reads parts of stored tensors into memory, and verifies the checksums of every chunk that they touch."""

import os
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import numpy

from trunkline import _core
from trunkline._core import Engine, FileLayout
from trunkline._errors import Corrupt
from trunkline._export.stored import Integers, SourceFile, Stored
from trunkline._tensor_io.transfer import read_layouts

_MAX_OPEN = 256  # files that are held open, so that they stay readable when they are removed meanwhile
_MAX_RUNS = 1 << 16  # that are read at once: they bound the memory that describes them
_LEAST_BYTES = 1 << 20


class Part(NamedTuple):
    """Bytes [begin, end) of a stored tensor, and the address of the memory for them. `name`: for messages."""

    stored: Stored
    begin: int
    end: int
    address: int
    name: str


class WindowReader:
    """Reads parts of stored tensors; a context manager that closes the files."""

    def __init__(self, engine: Engine | None = None, *, verify: bool = True) -> None:
        """`verify`: compare what is read with the checksums, where the files have some."""
        self._engine = engine
        self._verify = verify
        self._open: dict[SourceFile, int] = {}

    def __enter__(self) -> "WindowReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def hold(self, stored: Sequence[Stored]) -> None:
        """Open the files, so that reading goes on where another process removes them.

        Raises Corrupt for one that is missing, OSError if one cannot be opened.
        """
        for tensor in stored:
            for file in tensor.files():
                if len(self._open) >= _MAX_OPEN:
                    return
                if file not in self._open:
                    try:
                        self._open[file] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                    except FileNotFoundError:
                        raise _missing(file) from None

    def read(self, parts: Sequence[Part], owner: object) -> None:
        """Fill the memory of all parts, which `owner` keeps alive; what is in no file stays as it is.

        Raises Corrupt, naming file, chunk and tensor, for bytes that contradict their checksum, or a missing
        file; errors of reading.
        """
        group: list[Part] = []
        runs = 0
        for part in parts:
            step = max(_LEAST_BYTES, min(part.end - part.begin, _MAX_RUNS * part.stored.run_bytes))
            for begin in range(part.begin, part.end, step):
                end = min(begin + step, part.end)
                more = -(-(end - begin) // part.stored.run_bytes)
                if group and runs + more > _MAX_RUNS:
                    self._read_group(group, owner)
                    group, runs = [], 0
                address = part.address + begin - part.begin
                group.append(part._replace(begin=begin, end=end, address=address))
                runs += more
        if group:
            self._read_group(group, owner)

    def _read_group(self, parts: list[Part], owner: object) -> None:
        wanted: dict[SourceFile, list[tuple[Integers, Integers, Integers]]] = {}
        for part in parts:
            for file, at, begin, nbytes in part.stored.runs(part.begin, part.end):
                addresses = at - part.begin + part.address
                wanted.setdefault(file, []).append((begin, nbytes, addresses))
        files = list(wanted)
        layouts: list[FileLayout] = []
        chunks: list[list[int]] = []
        for file in files:
            begins, sizes, addresses = (numpy.concatenate(each) for each in zip(*wanted[file], strict=True))
            layout = FileLayout(file.path, file.nbytes)
            layout.add_targets(begins.tolist(), sizes.tolist(), addresses.tolist(), owner)
            touched = _chunks_of(file, begins, sizes) if self._verify else []
            for chunk in touched:
                layout.add_checksum("crc32c", *_chunk_range(file, chunk), file.checksums[chunk])
            if file in self._open:
                path = f"/proc/self/fd/{self._open[file]}"
                layout.read_from(_core.open(path, engine=self._engine, direct="unless_cached"))
            layouts.append(layout)
            chunks.append(touched)
        if not layouts:
            return
        try:
            read_layouts(layouts, engine=self._engine, verify=any(chunks))
        except Corrupt as error:
            index, checksum = getattr(error, "layout", None), getattr(error, "checksum", None)
            if index is None or checksum is None:
                raise
            raise _corrupt_chunk(files[index], chunks[index][checksum], parts) from error
        except FileNotFoundError as error:
            raise _missing(next((file for file in files if file.path == error.filename), files[0])) from None


def _missing(file: SourceFile) -> Corrupt:
    return Corrupt(
        None,
        f"{file.path} is missing, a file of the checkpoint; mount its disk if it is not mounted, or use "
        "another checkpoint (a run that saves meanwhile may have removed this one)",
        file.path,
    )


def _chunks_of(file: SourceFile, begins: Integers, sizes: Integers) -> list[int]:
    if not file.checksums:
        return []
    first = (begins - file.chunks_begin) // file.chunk_bytes
    last = (begins + sizes - 1 - file.chunks_begin) // file.chunk_bytes
    touched: set[int] = set()
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        touched.update(range(low, high + 1))
    return sorted(touched)


def _chunk_range(file: SourceFile, chunk: int) -> tuple[int, int]:
    begin = file.chunks_begin + chunk * file.chunk_bytes
    return begin, min(begin + file.chunk_bytes, file.nbytes)


def _corrupt_chunk(file: SourceFile, chunk: int, parts: Sequence[Part]) -> Corrupt:
    begin, end = _chunk_range(file, chunk)
    names = []
    for part in parts:
        for other, _, begins, sizes in part.stored.runs(part.begin, part.end):
            if other is file and bool(((begins < end) & (begins + sizes > begin)).any()):
                names.append(part.name)
    names = list(dict.fromkeys(names))
    of = f", of the tensor {names[0]!r}" if names else ""
    of += f" and {len(names) - 1} more" if len(names) > 1 else ""
    error = Corrupt(
        None,
        f"{file.path} is corrupt: chunk {chunk} (bytes {begin} to {end}){of}, does not match the checksum it "
        "was written with; use another step, or restore the file from a copy",
        file.path,
    )
    with suppress(IndexError):
        error.tensor = names[0]
    error.chunk = chunk
    return error
