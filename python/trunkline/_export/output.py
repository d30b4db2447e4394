"""Writes one file out of parts of other files, window by window.

1. The file is written under a temporary name (ReplacementFile), so that nothing appears under its own before
   it is complete, and what a killed process leaves behind is removed by the next save into the folder.
2. A window of memory is filled: literal bytes are copied, stored ones are read and verified. Checksums of the
   output are updated from the window.
3. It is written while the next window is read. Two windows bound the memory, however large the file is.
4. Fields that depend on checksums are written, the file is synced, and gets its name: by a link if none may
   be replaced, so that a file that another process makes meanwhile stays.
"""

import bisect
import errno
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch

from trunkline import _core
from trunkline._core import Engine, File, Future
from trunkline._errors import Error, exception_of, reword
from trunkline._export.lazy_state import StoredBytes
from trunkline._export.window import Part, WindowReader
from trunkline._paths import absolute_path

WINDOW_BYTES = 64 << 20  # of each of two

Literals: TypeAlias = "bytes | bytearray | torch.Tensor"  # a tensor: flat, of uint8, in main memory


class Placed(NamedTuple):
    """Bytes of the output, from `offset` on."""

    offset: int
    nbytes: int
    content: "StoredBytes | Literals"


class Sum(NamedTuple):
    """A checksum of bytes [begin, end) of the output."""

    kind: Literal["crc32", "crc32c"]
    begin: int
    end: int


@dataclass
class Output:
    """The contents of a file. What is not placed is zeros."""

    nbytes: int
    placed: list[Placed]  # by offset, without overlaps
    sums: list[Sum] = field(default_factory=list)  # in order, without overlaps
    # Called with the values of the sums: what to write once they are known, as pairs of offset and bytes.
    fields: Callable[[Sequence[int]], list[tuple[int, bytes]]] = lambda values: []


def check_target(path: str, force: bool) -> None:
    """Raise an error for a path that cannot be written, before anything is read.

    FileExistsError for one that is taken, unless `force`; IsADirectoryError for a directory;
    FileNotFoundError where its folder does not exist.
    """
    if not os.path.lexists(path):
        folder = os.path.dirname(path)  # noqa: PTH120
        if not os.path.isdir(folder):  # noqa: PTH112
            raise exception_of(
                "system",
                errno.ENOENT,
                f"cannot write {path}: {folder} does not exist: create it (mkdir -p {folder})",
                path,
            )
        return
    if os.path.isdir(path):  # noqa: PTH112
        raise exception_of("system", errno.EISDIR, f"cannot write {path}: it is a directory", path)
    if not force:
        raise exists_error(path)


def exists_error(path: str) -> Exception:
    """Make the error for an output that exists already."""
    return exception_of(
        "system",
        errno.EEXIST,
        f"cannot write {path}: it exists already; choose another name, or replace it with force=True",
        path,
    )


def write_output(
    output: Output,
    path: str,
    reader: WindowReader,
    *,
    force: bool = False,
    engine: Engine | None = None,
    on_progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write the file durably; it has its name only once it is complete.

    `on_progress` is called with the bytes of each window that is done. Raises FileExistsError unless `force`
    if there is a file of that name, and errors of reading and writing; then no part of the file is left.
    """
    name = absolute_path(path)
    check_target(name, force)
    replacement = _core.ReplacementFile(name)
    opened = f"/proc/self/fd/{replacement.fileno()}"  # its temporary name is nobody's business
    try:
        with _core.open(opened, "r+", engine=engine) as file:
            values = _write_windows(output, file, reader, on_progress)
            file.sync()
        for offset, data in output.fields(values):
            _write_all(replacement.fileno(), data, offset)
        if force:
            replacement.finish()
        else:
            _link(replacement.fileno(), name, replacement)
    except BaseException as error:
        replacement.discard()
        if isinstance(error, Error) and error.filename == opened:
            reword(error, str(error.strerror).replace(opened, name))
            error.filename = name
        if isinstance(error, Error) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise exception_of(
                "system",
                error.errno,
                f"cannot write {name}: {output.nbytes} bytes do not fit ({error})",
                name,
            ) from error
        raise


def _link(descriptor: int, path: str, replacement: "_core.ReplacementFile") -> None:
    """Give the file its name unless there is one; decided by the filesystem."""
    os.fsync(descriptor)
    here = os.open("/", os.O_PATH)
    try:
        # With a descriptor Python passes AT_SYMLINK_FOLLOW on: what the number leads to is linked.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=here, follow_symlinks=True)
    except FileExistsError:
        raise exists_error(path) from None
    except OSError:  # a filesystem without links
        if os.path.lexists(path):
            raise exists_error(path) from None
        replacement.finish()
        return
    finally:
        os.close(here)
    replacement.discard()
    _core.fsync_directory(os.path.dirname(path))  # noqa: PTH120


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _write_windows(
    output: Output, file: File, reader: WindowReader, on_progress: Callable[[int], object]
) -> list[int]:
    """Write all but the fields; return the values of the sums."""
    file.truncate(output.nbytes)
    window_bytes = min(WINDOW_BYTES, -(-max(output.nbytes, 1) // 4096) * 4096)
    windows = [_core.aligned_empty(window_bytes) for _ in range(2 if output.nbytes > window_bytes else 1)]
    pending: list[Future | None] = [None] * len(windows)
    values = [0] * len(output.sums)
    try:
        for number, begin in enumerate(range(0, output.nbytes, window_bytes)):
            turn = number % len(windows)
            _finish(pending, turn)
            memory = torch.frombuffer(windows[turn], dtype=torch.uint8)
            end = min(begin + window_bytes, output.nbytes)
            _fill(output, begin, end, memory, reader)
            _add_to_sums(output, begin, end, memory, values)
            pending[turn] = file.async_pwrite(memory[: end - begin], begin)
            on_progress(end - begin)
        for turn in range(len(pending)):
            _finish(pending, turn)
    finally:
        for each in pending:  # the memory is theirs until they have ended
            if each is not None:
                each.cancel()
                with suppress(Exception):
                    each.wait()
    return values


def _finish(pending: list[Future | None], turn: int) -> None:
    future = pending[turn]
    if future is not None:
        future.result()
        pending[turn] = None


def _fill(output: Output, begin: int, end: int, memory: torch.Tensor, reader: WindowReader) -> None:
    address = memory.data_ptr()
    parts: list[Part] = []
    reached = begin
    first = max(0, bisect.bisect_right(output.placed, begin, key=lambda each: each.offset) - 1)
    for index in range(first, len(output.placed)):
        offset, nbytes, content = output.placed[index]
        low, high = max(begin, offset), min(end, offset + nbytes)
        if offset >= end:
            break
        if low >= high:
            continue
        memory[reached - begin : low - begin] = 0
        reached = high
        into = memory[low - begin : high - begin]
        if isinstance(content, StoredBytes):
            if content.stored.has_gaps:
                into.zero_()
            at = content.begin + low - offset
            where = address + low - begin
            parts.append(Part(content.stored, at, at + high - low, where, content.name))
        elif isinstance(content, torch.Tensor):
            into.copy_(content[low - offset : high - offset])
        else:
            view = bytearray(content[low - offset : high - offset])
            into.copy_(torch.frombuffer(view, dtype=torch.uint8))
    memory[reached - begin : end - begin] = 0
    reader.read(parts, memory)


def _add_to_sums(output: Output, begin: int, end: int, memory: torch.Tensor, values: list[int]) -> None:
    view = memoryview(memory.numpy())  # type: ignore[arg-type]  # an array is a buffer
    first = bisect.bisect_right(output.sums, begin, key=lambda each: each.end)
    for index in range(first, len(output.sums)):
        kind, sum_begin, sum_end = output.sums[index]
        if sum_begin >= end:
            break
        part = view[max(begin, sum_begin) - begin : min(end, sum_end) - begin]
        add = zlib.crc32 if kind == "crc32" else _core.crc32c
        values[index] = add(part, values[index])
