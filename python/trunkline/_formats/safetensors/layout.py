"""Lays safetensors files out for writing."""

from collections.abc import Mapping
from typing import Any

import torch

from trunkline import _core
from trunkline._errors import Unsupported
from trunkline._formats.safetensors import checksums
from trunkline._tensor_io.sources import SourceLayout, Sources
from trunkline._tensor_io.tensors import (
    bytes_of,
    contiguous,
    dtype_name,
    has_own_advice,
    in_safetensors,
    objection,
    objection_in_any_file,
    objection_in_pt,
)
from trunkline._types import Path

ALIGNMENT = 4096
_MAX_JSON_BYTES = 100_000_000  # kMaxHeaderBytes of src/format/safetensors.h
_LENGTH_BYTES = 8
_HINT = "; give the path the suffix .pt to save it with trunkline.save"


def lay_out(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    checksum: bool = True,
) -> SourceLayout:
    """Return the layout of a safetensors file of `tensors`, a mapping of names to tensors, for write_layouts.

    The layout refers to the tensors' memory, which must not change until it is written. Tensors that are not
    contiguous (or lazily conjugated or negated) are copied, and the copies live as long as the layout.
    Tensors that share memory, such as tied weights, are each stored under their own name: the reference
    implementation rejects them, but the loaded tensors have the right values, though they no longer share
    memory.

    The data begin at a multiple of 4096, and so does each tensor whose size is a multiple of it. With
    `checksum` the metadata also has "trunkline.crc32c" (docs/formats/safetensors-checksums.md); one in
    `metadata`, from another file, is omitted.

    Raises TypeError for names, tensors or metadata of other types, ValueError for names that are not UTF-8 or
    reserved, Unsupported for dtypes that the format lacks and tensors that are not dense or on another device
    than the CPU and CUDA GPUs.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"tensors: must be a dict of tensors by name for safetensors, not {type(tensors).__name__}{_HINT}"
        )
    kept = {name: _storable(name, tensor) for name, tensor in tensors.items()}
    described = [(name, dtype_name(tensor.dtype), _shape_in_file(tensor)) for name, tensor in kept.items()]
    entries = _checked_metadata(metadata)
    data_bytes = sum(tensor.nbytes for tensor in kept.values())
    if checksum:
        entries[checksums.KEY] = checksums.placeholder(data_bytes)
    head_bytes, places, file_bytes = _core.lay_out_safetensors(described, entries, ALIGNMENT)
    head = bytearray(head_bytes)
    shift = 0
    if checksum and not head.endswith(b" " * checksums.MIN_PADDING):
        shift = ALIGNMENT
        head = padded(head, shift)

    names = list(kept)
    sources = Sources(
        [tensor.untyped_storage() for tensor in kept.values()],
        list(kept.values()),
        lambda index: f"the tensor {names[index]!r}",
    )
    layout = SourceLayout(path, file_bytes + shift, sources)
    if checksum:
        sums_at = checksums.fill_in(head)
        for chunk in range(checksums.chunk_count(data_bytes)):
            begin = len(head) + chunk * checksums.CHUNK_BYTES
            end = min(begin + checksums.CHUNK_BYTES, file_bytes + shift)
            layout.add_checksum_field(sums_at + 8 * chunk, layout.add_checksum("crc32c", begin, end), "hex")
    layout.add(0, bytes(head))
    for tensor, (begin, _) in zip(kept.values(), places, strict=True):
        if tensor.numel():
            layout.add(begin + shift, bytes_of(tensor))
    return layout


def _storable(name: Any, tensor: Any) -> torch.Tensor:
    if type(name) is not str:
        raise TypeError(f"tensors: its keys must be str, not {type(name).__name__} ({name!r})")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensors: {name!r} must be a torch.Tensor, not {type(tensor).__name__}{_HINT}")
    if not _is_utf8(name):
        raise ValueError(f"tensors: the name {name!r} is not valid UTF-8")
    why = objection(tensor)
    if why is None and (why := objection_in_pt(tensor.dtype)) is not None:
        raise Unsupported(None, f"the tensor {name!r} {why}")
    if why is None and not in_safetensors(tensor.dtype):
        why = f"has the dtype {tensor.dtype}, which safetensors files do not support"
    if why is None and tensor.dtype is torch.float4_e2m1fn_x2 and tensor.dim() == 0:
        why = f"has the dtype {tensor.dtype} and no dimension, which safetensors files do not support"
    if why is not None:
        # A .pt file would contain only one rank's part of a distributed tensor.
        hint = "" if objection_in_any_file(tensor) or has_own_advice(tensor) else _HINT
        raise Unsupported(None, f"the tensor {name!r} {why}{hint}")
    return contiguous(tensor)


def _shape_in_file(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in elements of the format: torch counts a pair of 4-bit elements as one."""
    shape = tuple(tensor.shape)
    return (*shape[:-1], 2 * shape[-1]) if tensor.dtype is torch.float4_e2m1fn_x2 else shape


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    checked: dict[str, str] = {}
    for key, value in (metadata or {}).items():
        if type(key) is not str or type(value) is not str:
            raise TypeError(f"metadata: must be of str to str, not {key!r}: {value!r}")
        if not _is_utf8(key) or not _is_utf8(value):
            raise ValueError(f"metadata: {key!r}: {value!r} is not valid UTF-8")
        if key != checksums.KEY:
            checked[key] = value
    return checked


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def padded(head: bytearray, more: int) -> bytearray:
    """Return the head of a file with `more` spaces at its end. Raises ValueError if it is too large then."""
    json_bytes = len(head) - _LENGTH_BYTES + more
    if json_bytes > _MAX_JSON_BYTES:
        raise ValueError(f"tensors: their header has {json_bytes} bytes; store them in several files")
    return bytearray(json_bytes.to_bytes(_LENGTH_BYTES, "little")) + head[_LENGTH_BYTES:] + b" " * more
