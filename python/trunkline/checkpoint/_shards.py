"""Shards of a checkpoint: stock safetensors files of whole tensors and of pieces of large ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trunkline import _core
from trunkline._core import FileImage
from trunkline._errors import Corrupt, Format
from trunkline._modes import makes_ordinary_tensors
from trunkline.checkpoint._memory import CPU, empty_bytes, is_fresh
from trunkline.checkpoint._shares import Piece
from trunkline.checkpoint._tensors import bytes_of, contiguous, dtype_name, dtype_named

ALIGNMENT = 4096
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Described:
    """A tensor as the manifest has it: dtype by its name in safetensors files, shape in their elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "Described":
        """Describe a tensor that safetensors files can hold."""
        shape = tuple(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:  # the format counts each of a pair
            shape = (*shape[:-1], 2 * shape[-1])
        return cls(name, dtype_name(tensor.dtype), shape, tensor.nbytes)


@dataclass(frozen=True)
class Placed:
    """Where a piece of a tensor lies in its shard."""

    piece: Piece
    offset: int


def lay_out(
    path: str,
    tensors: Sequence[torch.Tensor],
    described: Sequence[Described],
    pieces: Sequence[Piece],
    streams: "Mapping[torch.device, torch.cuda.Stream]",
) -> tuple[FileImage, list[Placed]]:
    """Lay out the shard of `pieces`: an image with a checksum for each chunk, and where each piece went.

    A whole tensor stands under its name; a piece of one as a flat tensor "NAME[BEGIN:END]" in bytes. Tensors
    of GPUs are read when these `streams` come to it.
    """
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
    head, places, file_bytes = _core.lay_out_safetensors(entries, {}, ALIGNMENT)
    image = FileImage(path, file_bytes)
    image.add(0, head)
    for piece, (begin, _) in zip(pieces, places, strict=True):
        whole = bytes_of(contiguous(tensors[piece.tensor]))
        image.add(begin, whole[piece.begin : piece.end], stream=streams.get(whole.device))
    for begin in range(0, file_bytes, CHUNK_BYTES):
        image.add_sum("crc32c", begin, min(begin + CHUNK_BYTES, file_bytes))
    return image, [Placed(piece, begin) for piece, (begin, _) in zip(pieces, places, strict=True)]


def parse_crc32c(text: str) -> list[int]:
    """Return the checksums of a shard's chunks."""
    return [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]


def format_crc32c(sums: Sequence[int]) -> str:
    """Return them as the manifest has them."""
    return "".join(f"{value:08x}" for value in sums)


@makes_ordinary_tensors
def empty_like(about: dict[str, Any], path: str, device: torch.device = CPU) -> torch.Tensor:
    """Make memory for a tensor of a manifest; each large one has pages of its own, which go with it."""
    dtype = dtype_named(about["dtype"])
    shape = tuple(about["shape"])
    if dtype is torch.float4_e2m1fn_x2:
        shape = (*shape[:-1], shape[-1] // 2)
    nbytes = sum(piece[2] for piece in about["pieces"])
    try:
        return empty_bytes(nbytes, device).view(dtype).reshape(shape)
    except RuntimeError as error:
        raise Format(None, f"{path}: the tensor {about['name']!r}: {error}", path) from None


def targets(
    manifest: dict[str, Any],
    paths: Sequence[str],
    tensors: dict[str, torch.Tensor],
    *,
    verify: bool,
    fresh: bool,
) -> list[FileImage]:
    """Make the images that read all shards into `tensors`, contiguous ones; `fresh`: of empty_like()."""
    images = [FileImage(path, shard["bytes"]) for path, shard in zip(paths, manifest["shards"], strict=True)]
    for about in manifest["tensors"]:
        flat = bytes_of(tensors[about["name"]])
        at = 0
        for shard, offset, nbytes in about["pieces"]:
            images[shard].add_target(offset, flat[at : at + nbytes], fresh=fresh and is_fresh(flat.numel()))
            at += nbytes
    if verify:
        chunk_bytes = manifest["chunk_bytes"]
        for image, shard in zip(images, manifest["shards"], strict=True):
            for index, value in enumerate(parse_crc32c(shard["crc32c"])):
                begin = index * chunk_bytes
                image.add_sum("crc32c", begin, min(begin + chunk_bytes, shard["bytes"]), value)
    return images


def first_tensor(manifest: dict[str, Any], shard: int) -> str | None:
    """Return the name of the first tensor that has bytes in a shard."""
    for about in manifest["tensors"]:
        if any(piece[0] == shard for piece in about["pieces"]):
            return str(about["name"])
    return None


def corrupt_chunk(manifest: dict[str, Any], paths: Sequence[str], shard: int, chunk: int) -> Corrupt:
    """Make the error for a chunk that is not as it was written: names the first tensor concerned."""
    begin = chunk * manifest["chunk_bytes"]
    end = begin + manifest["chunk_bytes"]
    names = [
        about["name"]
        for about in manifest["tensors"]
        if any(
            index == shard and offset < end and offset + nbytes > begin
            for index, offset, nbytes in about["pieces"]
        )
    ]
    what = f"of the tensor {names[0]!r}" if names else "of its header"
    if len(names) > 1:
        what += f" and {len(names) - 1} more"
    error = Corrupt(
        None,
        f"{paths[shard]} is corrupt: chunk {chunk} (bytes {begin} to {end}), {what}, does not have the "
        "checksum it was written with; load an earlier step, or what is left with verify=False",
        paths[shard],
    )
    error.tensor, error.chunk = names[0] if names else None, chunk
    return error
