"""Loads safetensors files, and verifies their checksums."""

import errno
import mmap as mapping
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeAlias

from trunkline import _core
from trunkline._core import Engine, FileLayout, GcPause
from trunkline._errors import Corrupt, CutOff, Format, Unsupported, exception_of
from trunkline._formats.file_version import Version, check_unchanged, version_of
from trunkline._formats.safetensors import checksums as stored_checksums
from trunkline._formats.safetensors.checksums import Sums
from trunkline._formats.selection import Selection
from trunkline._tensor_io import transfer
from trunkline._tensor_io.arrays import no_such_dtype
from trunkline._tensor_io.memory import CPU, empty_bytes, is_fresh
from trunkline._tensor_io.tensors import dtype_named
from trunkline._torch_or_numpy import HAS_TORCH, LIBRARY, torch
from trunkline._types import Path

MAX_ATTEMPTS = 10  # to read a file that is being replaced

_LENGTH_BYTES = 8
_ZIP_MAGIC = b"PK\x03\x04"

Verify: TypeAlias = Literal["auto"] | bool


class ReadLayouts(Protocol):
    """A function that fills layouts: read_layouts of transfer.py."""

    def __call__(
        self, layouts: Sequence[FileLayout], *, engine: Engine | None = None, verify: bool = True
    ) -> None:
        """Fill the memory of all layouts."""


class StoredTensor(NamedTuple):
    """A tensor as the header describes it: the format's name of the dtype, and its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The parsed header of a file."""

    path: str
    file_bytes: int
    head: bytes  # all bytes before the data
    metadata: dict[str, str]
    tensors: list[StoredTensor]  # in the order of their bytes; those to load
    version: Version | None  # of the file at its path just before it was opened

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.file_bytes - len(self.head)


def load(
    path: Path,
    *,
    device: torch.device = CPU,
    engine: Engine | None = None,
    verify: Verify = "auto",
    mmap: bool = False,
    selection: Selection | None = None,
    read_layouts: ReadLayouts = transfer.read_layouts,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, in the order of their bytes, in new memory on `device`.

    With a `selection` only the tensors that it selects are read and returned.

    `verify`: "auto" compares the data with the checksums that trunkline wrote into the file, if it has them
    (not if another program rewrote it); True requires them; False ignores them. `mmap`: the tensors are
    private views of the mapped file, read when they are touched, which `verify` cannot check; tensors that
    are not aligned to their element size are copies.

    Raises Format for an invalid file, Unsupported for dtypes that torch lacks, Corrupt for damaged bytes; for
    those of the data with `tensor` (the first concerned) and `chunk` (its number in the file's data).
    """
    for _ in range(MAX_ATTEMPTS):
        version = version_of(path)
        with _core.open(path, engine=engine, direct="unless_cached") as file:
            [header] = selected_headers([header_of(file, path, version)], selection, os.fsdecode(path))
            # While the file is open: another one may have its name by now.
            with suppress(Replaced):
                [tensors] = load_files(
                    [header],
                    [file],
                    device=device,
                    engine=engine,
                    verify=verify,
                    mmap=mmap,
                    read_layouts=read_layouts,
                )
                return tensors
    raise replaced_error(os.fsdecode(path))


def selected_headers(headers: Sequence[Header], selection: Selection | None, path: str) -> list[Header]:
    """Return the headers with only the tensors that are selected.

    Raises ValueError, which names `path`, if a key selects nothing.
    """
    if selection is None:
        return list(headers)
    kept = [
        replace(header, tensors=[each for each in header.tensors if selection.selects(each.name)])
        for header in headers
    ]
    selection.check(path, (each.name for header in headers for each in header.tensors))
    return kept


class Replaced(Exception):
    """The file was replaced since its header was read. Loading again helps."""


def replaced_error(path: str) -> Exception:
    """Make the error for a file that was replaced during every attempt to load it."""
    return exception_of(
        "system",
        errno.ESTALE,
        f"{path} was replaced while it was loaded, {MAX_ATTEMPTS} times in a row; load it when no process "
        "writes there, or write each version under a separate name",
        path,
    )


def read_header(path: Path, *, engine: Engine | None = None) -> Header:
    """Read and check the header of a file. Raises Format."""
    version = version_of(path)
    with _core.open(path, engine=engine) as file:
        return header_of(file, path, version)


def header_of(file: "_core.File", path: Path, version: Version | None) -> Header:
    """Read and check the header of an open file; `version`: version_of() its path before it was opened."""
    name = os.fsdecode(path)
    file_bytes = file.size
    head = bytearray(min(_LENGTH_BYTES, file_bytes))
    file.pread(head)
    if len(head) < _LENGTH_BYTES:
        raise CutOff(
            None,
            f"{name} is not a valid safetensors file: it has {file_bytes} bytes; copy or save it again",
            name,
        )
    if head.startswith(_ZIP_MAGIC) and any(head[len(_ZIP_MAGIC) :]):  # otherwise a length below 100 MB
        raise Format(
            None,
            f"{name} is not a safetensors file but a zip file; if torch.save wrote it, rename it to end "
            "with .pt",
            name,
        )
    try:
        json = bytearray(_core.parse_safetensors_length(head, file_bytes, path))
        file.pread(json, _LENGTH_BYTES)
        with GcPause():
            metadata, described = _core.parse_safetensors(json, file_bytes, path)
            stored = [StoredTensor._make(fields) for fields in described]
            del described
    except Corrupt as error:
        raise CutOff(None, error.strerror, name) from None
    return Header(name, file_bytes, bytes(head + json), metadata, stored, version)


def load_files(
    headers: Sequence[Header],
    files: "Sequence[_core.File]" = (),
    *,
    device: torch.device = CPU,
    engine: Engine | None = None,
    verify: Verify = "auto",
    mmap: bool = False,
    keep_open: bool = False,
    read_layouts: ReadLayouts = transfer.read_layouts,
) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each file, all read at once; arguments and errors are those of load().

    `files`: the open files that the headers were read from; without them they are opened again. They are
    closed unless keep_open. Raises Replaced if a file to be mapped was replaced since its header was read.
    """
    if verify not in ("auto", True, False):
        raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
    if mmap and verify is True:
        raise ValueError("verify: cannot be True with mmap: a mapped file is read only when it is touched")
    if mmap and device.type != "cpu":
        raise ValueError(f"mmap: mapped files are in main memory, not on {device}; load without mmap")
    if mmap:
        return [_mapped(header) for header in headers]
    all_sums = [checksums_of(header, verify) for header in headers]
    with GcPause():
        loaded = [
            {tensor.name: empty_tensor(tensor, header.path, device) for tensor in header.tensors}
            for header in headers
        ]
        chunks = [_chunks_to_verify(*each) for each in zip(headers, all_sums, strict=True)]
        layouts = [_target(*parts) for parts in zip(headers, loaded, all_sums, chunks, strict=True)]
    for layout, file in zip(layouts, files, strict=False):
        layout.read_from(file, keep_open=keep_open)
    try:
        read_layouts(layouts, engine=engine, verify=verify is not False)
    except Corrupt as error:
        index, checksum = getattr(error, "layout", None), getattr(error, "checksum", None)
        sums = None if index is None else all_sums[index]
        if index is None or checksum is None or sums is None:
            raise
        raise corrupt_chunk(headers[index], sums, chunks[index][checksum]) from error
    for header, sums in zip(headers, all_sums, strict=True):
        if sums is None:
            check_unchanged(header.path, header.version)
    return loaded


def checksums_of(header: Header, verify: Verify) -> Sums | None:
    """Return the checksums to verify a file by; None: there are none, or verify is False. Raises Format."""
    if verify is False:
        return None
    sums = stored_checksums.find(header.metadata, header.head, header.data_bytes, header.path)
    if sums is None and verify is True:
        raise Format(
            None,
            f"{header.path} has no checksums, which verify=True requires; load it with verify='auto', or "
            "save it with trunkline.save, which adds them",
            header.path,
        )
    return sums


def _mapped(header: Header) -> dict[str, torch.Tensor]:
    with open(header.path, "rb") as file:  # noqa: PTH123
        if version_of(file.fileno()) != header.version:
            raise Replaced
        mapped = mapping.mmap(file.fileno(), 0, access=mapping.ACCESS_COPY)
    if len(mapped) != header.file_bytes:
        raise Corrupt(None, f"{header.path} changed its size while it was loaded", header.path)
    tensors: dict[str, torch.Tensor] = {}
    for stored in header.tensors:
        dtype, shape = dtype_and_shape(stored, header.path)
        if stored.begin == stored.end:
            tensors[stored.name] = empty_tensor(stored, header.path)
            continue
        raw = torch.frombuffer(
            mapped, dtype=torch.uint8, count=stored.end - stored.begin, offset=stored.begin
        )
        if stored.begin % dtype.itemsize != 0:
            raw = raw.clone()
        tensors[stored.name] = _shaped(raw.view(dtype), shape, stored.name, header.path)
    return tensors


def dtype_and_shape(stored: StoredTensor, path: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a tensor in torch's terms."""
    shape = stored.shape
    try:
        dtype = dtype_named(stored.dtype)
    except ValueError:
        what = f"{path}: the tensor {stored.name!r}"
        if not HAS_TORCH:
            raise no_such_dtype(what, stored.dtype, path) from None
        raise Unsupported(
            None, f"{what} has the dtype {stored.dtype}, which torch does not support", path
        ) from None
    if dtype is torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2 != 0:
            raise Unsupported(
                None,
                f"{path}: the tensor {stored.name!r} has dtype F4 and shape {list(shape)}; torch supports "
                "only an even last extent",
                path,
            )
        shape = (*shape[:-1], shape[-1] // 2)
    return dtype, shape


def empty_tensor(stored: StoredTensor, path: str, device: torch.device = CPU) -> torch.Tensor:
    """Allocate a tensor; a large one gets separate pages, which are freed with it."""
    dtype, shape = dtype_and_shape(stored, path)
    nbytes = stored.end - stored.begin
    if nbytes > 0 and not is_fresh(nbytes):
        # One call for each of many small tensors. Torch supports every shape with elements.
        return torch.empty(shape, dtype=dtype, device=device)
    return _shaped(empty_bytes(nbytes, device).view(dtype), shape, stored.name, path)


def _shaped(flat: torch.Tensor, shape: tuple[int, ...], name: str, path: str) -> torch.Tensor:
    try:
        return flat.reshape(shape)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        why = str(error).partition("\n")[0]
        raise Format(
            None, f"{path}: the tensor {name!r} has a shape that {LIBRARY} does not support ({why})", path
        ) from None


def _chunks_to_verify(header: Header, sums: Sums | None) -> list[int]:
    """Return the chunks in which the header's tensors have bytes."""
    if sums is None:
        return []
    chunks: dict[int, None] = {}
    for stored in header.tensors:
        if stored.end > stored.begin:
            first = (stored.begin - len(header.head)) // sums.chunk_bytes
            last = (stored.end - 1 - len(header.head)) // sums.chunk_bytes
            chunks.update(dict.fromkeys(range(first, last + 1)))
    return list(chunks)


def _target(
    header: Header, tensors: Mapping[str, torch.Tensor], sums: Sums | None, chunks: Sequence[int]
) -> FileLayout:
    layout = FileLayout(header.path, header.file_bytes)
    for stored in header.tensors:
        if stored.end > stored.begin:
            nbytes = stored.end - stored.begin
            layout.add_target(stored.begin, tensors[stored.name], fresh=is_fresh(nbytes))
    if sums is not None:
        for chunk in chunks:
            layout.add_checksum("crc32c", *_chunk_range(header, sums, chunk), sums.values[chunk])
    return layout


def _chunk_range(header: Header, sums: Sums, chunk: int) -> tuple[int, int]:
    begin = len(header.head) + chunk * sums.chunk_bytes
    return begin, min(begin + sums.chunk_bytes, header.file_bytes)


def corrupt_chunk(header: Header, sums: Sums, chunk: int) -> Corrupt:
    """Make the error for a chunk of a file's data that does not match its checksum."""
    begin, end = _chunk_range(header, sums, chunk)
    names = [stored.name for stored in header.tensors if stored.begin < end and stored.end > begin]
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    error = Corrupt(
        None,
        f"{header.path} is corrupt: chunk {chunk} of its data (bytes {begin} to {end}), of the tensor"
        f"{'s' if len(names) > 1 else ''} {shown}, does not match the checksum it was written with; restore "
        "it from a copy, or load the remaining data with verify=False",
        header.path,
    )
    error.tensor, error.chunk = names[0], chunk
    return error
