"""Shards of a checkpoint: stock safetensors files with whole tensors and pieces of large ones."""

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trunkline import _core
from trunkline._core import CheckpointManifest, FileLayout
from trunkline._errors import Corrupt, Format, Unsupported
from trunkline._modes import makes_ordinary_tensors
from trunkline._tensor_io.arrays import is_dtype_of_torch, no_such_dtype
from trunkline._tensor_io.memory import CPU, OWN_PAGES_BYTES, empty_bytes, is_fresh, out_of_memory
from trunkline._tensor_io.tensors import bytes_of, contiguous, dtype_name, dtype_named, in_safetensors
from trunkline._torch_or_numpy import torch
from trunkline._types import WritableBuffer
from trunkline.checkpoint.directory.shares import Piece

ALIGNMENT = 4096
CHUNK_BYTES = 1 << 20

# The format's limit for the head of a file, kMaxHeaderBytes of src/format/safetensors.h, less the padding.
MAX_HEAD_BYTES = 100_000_000 - 2 * ALIGNMENT
# An entry with the longest name of a dtype, offsets of 19 digits, and "[BEGIN:END]" after the name.
_ENTRY_BYTES = len('"":{"dtype":"F8_E4M3FNUZ","shape":[],"data_offsets":[,]},') + 4 * 19 + len("[:]~")
_EXTENT_BYTES = 20


class TensorRecord(NamedTuple):
    """A tensor as in the manifest: dtype as named in safetensors files, shape in elements of that dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorRecord":
        """Return the record of a tensor that safetensors files can hold."""
        shape = tuple(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:  # the format counts each of a pair
            shape = (*shape[:-1], 2 * shape[-1])
        return cls(name, dtype_name(tensor.dtype), shape, tensor.nbytes)


def identity(manifest: CheckpointManifest) -> str:
    """Return a string that identifies a checkpoint and its copies, also among others of the same step.

    Names of shards are never reused; the number of a commit is, once that checkpoint is deleted.
    """
    names = [Path(path).name for path in manifest.shard_paths()]
    about = json.dumps([manifest.commit, names or str(manifest.state)])
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def head_bytes(described: Sequence[TensorRecord]) -> list[int]:
    """Return, for each tensor, the most bytes that it or a piece of it needs in the head of a shard."""
    return [
        _ENTRY_BYTES + _EXTENT_BYTES * len(about.shape) + _bytes_in_json(about.name) for about in described
    ]


def _bytes_in_json(name: str) -> int:
    return len(name.encode()) + name.count('"') + name.count("\\")  # nothing else is escaped in our names


class PlacedPiece(NamedTuple):
    """A piece of a tensor and its offset in its shard."""

    piece: Piece
    offset: int


def head_of(
    described: Sequence[TensorRecord], pieces: Sequence[Piece]
) -> tuple[bytes, list[tuple[int, int]], int]:
    """Return the head of the shard of `pieces`, where the bytes of each begin and end, and its size."""
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    taken: set[str] = set()
    for piece in pieces:
        about = described[piece.tensor]
        if piece.end - piece.begin == about.nbytes:
            name, dtype, shape = about.name, about.dtype, about.shape
        else:
            name = f"{about.name}[{piece.begin}:{piece.end}]"
            dtype, shape = "U8", (piece.end - piece.begin,)
        while name in taken:
            name += "~"
        taken.add(name)
        entries.append((name, dtype, shape))
    return _core.lay_out_safetensors(entries, {}, ALIGNMENT)


def lay_out(
    path: str,
    tensors: Sequence[torch.Tensor],
    described: Sequence[TensorRecord],
    pieces: Sequence[Piece],
    streams: "Mapping[torch.device, torch.cuda.Stream]",
) -> tuple[FileLayout, list[PlacedPiece]]:
    """Lay out the shard of `pieces`: a layout with a checksum for each chunk, and the offset of each piece.

    A whole tensor is stored under its name; a piece as a flat tensor of bytes named "NAME[BEGIN:END]".
    Tensors on GPUs are read in order on these `streams`.
    """
    head, places, file_bytes = head_of(described, pieces)
    layout = FileLayout(path, file_bytes)
    layout.add(0, head)
    for piece, (begin, _) in zip(pieces, places, strict=True):
        tensor = tensors[piece.tensor]
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = contiguous(tensor)
        if piece.end - piece.begin != tensor.nbytes:
            tensor = bytes_of(tensor)[piece.begin : piece.end]
        layout.add(begin, tensor, stream=streams.get(tensor.device) if streams else None)
    for begin in range(0, file_bytes, CHUNK_BYTES):
        layout.add_checksum("crc32c", begin, min(begin + CHUNK_BYTES, file_bytes))
    return layout, [PlacedPiece(piece, begin) for piece, (begin, _) in zip(pieces, places, strict=True)]


def format_crc32c(sums: Sequence[int]) -> str:
    """Return checksums as the manifest stores them."""
    return "".join(f"{value:08x}" for value in sums)


@makes_ordinary_tensors
def empty_tensors(
    manifest: CheckpointManifest, path: str, device: torch.device = CPU, names: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Allocate the tensors of a manifest; large ones get separate pages, which are freed with them.

    names: of the tensors to allocate; None: of all.
    """
    made: dict[str, torch.Tensor] = {}
    for name, dtype_in_file, extents, nbytes in manifest.tensors():
        if names is not None and name not in names:
            continue
        dtype = _dtype_of(dtype_in_file, name, path)
        shape = extents
        if dtype is torch.float4_e2m1fn_x2:
            shape = (*shape[:-1], shape[-1] // 2)
        try:
            if is_fresh(nbytes) or not in_safetensors(dtype):
                made[name] = empty_bytes(nbytes, device).view(dtype).reshape(shape)
            else:
                made[name] = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            full = out_of_memory(error, f"{path}: the tensor {name!r} ({nbytes} bytes on {device})", path)
            raise full or Format(None, f"{path}: the tensor {name!r}: {error}", path) from None
    return made


def _dtype_of(name_in_file: str, tensor: str, path: str) -> torch.dtype:
    try:
        return dtype_named(name_in_file)
    except ValueError as error:
        what = f"{path}: the tensor {tensor!r}"
        if is_dtype_of_torch(name_in_file):
            raise no_such_dtype(what, name_in_file, path) from None
        raise Unsupported(None, f"{what}: {error}; use a newer torch", path) from None


class Targets(NamedTuple):
    """Layouts to read, and the index of the shard that each is of."""

    layouts: list[FileLayout]
    shards: list[int]


def targets(
    manifest: CheckpointManifest,
    path: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    verify: bool,
    fresh: bool,
    is_part: bool = False,
) -> Targets:
    """Return layouts that read shards into `tensors`, contiguous ones; `fresh`: from empty_tensors().

    is_part: other tensors are not read, nor shards in which `tensors` have no bytes.
    """
    try:
        memory: list[WritableBuffer | None] = [
            tensors.get(name) if is_part else tensors[name] for name, _, _, _ in manifest.tensors()
        ]
        layouts = manifest.layouts(
            memory, verify=verify, fresh_from_bytes=OWN_PAGES_BYTES if fresh else 2**63
        )
    except (KeyError, ValueError) as error:
        raise Format(None, f"{path}: the state and the tensors do not match: {error}", path) from None
    read = [(layout, shard) for shard, layout in enumerate(layouts) if layout is not None]
    return Targets([layout for layout, _ in read], [shard for _, shard in read])


def first_tensor(manifest: CheckpointManifest, shard: int) -> str | None:
    """Return the name of the first tensor that has bytes in a shard."""
    return next(iter(manifest.tensors_in(shard, 0, 2**63 - 1)), None)


WHAT_TO_LOAD = "; load another step, or the remaining data with verify=False"  # instead of a corrupt chunk


def corrupt_chunk(manifest: CheckpointManifest, read: Targets, index: int, checksum: int) -> Corrupt:
    """Make the error for a wrong checksum of a layout, by indices; it names the first tensor concerned."""
    layout, shard = read.layouts[index], read.shards[index]
    path = manifest.shard_paths()[shard]
    begin = layout.checksum_begin(checksum)
    chunk = begin // manifest.chunk_bytes
    end = min(begin + manifest.chunk_bytes, layout.nbytes)
    names = manifest.tensors_in(shard, begin, end)
    what = f"of the tensor {names[0]!r}" if names else "of its header"
    if len(names) > 1:
        what += f" and {len(names) - 1} more"
    error = Corrupt(
        None,
        f"{path} is corrupt: chunk {chunk} (bytes {begin} to {end}), {what}, does not match the "
        f"checksum it was written with{WHAT_TO_LOAD}",
        path,
    )
    error.tensor, error.chunk = names[0] if names else None, chunk
    return error
