"""Lays safetensors files out for writing."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy

from trunkline import _core
from trunkline._errors import Unsupported
from trunkline._formats.open_file import BinaryFile, write_all
from trunkline._formats.safetensors import checksums
from trunkline._tensor_io.arrays import Array, tensor_of
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
from trunkline._torch_or_numpy import HAS_TORCH, torch
from trunkline._types import Path

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Tensors of torch, arrays of numpy, or both.
Values: TypeAlias = "Mapping[str, torch.Tensor | Array]"

ALIGNMENT = 4096
_MAX_JSON_BYTES = 100_000_000  # kMaxHeaderBytes of src/format/safetensors.h
_LENGTH_BYTES = 8
if HAS_TORCH:
    _HINT = "; save it in a .pt file"
else:
    _HINT = "; use a trunkline.Checkpointer, which saves dicts and lists of arrays and values"


def lay_out(
    tensors: Values,
    path: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    checksum: bool = True,
) -> SourceLayout:
    """Return the layout of a safetensors file of `tensors`, a mapping of names to tensors or arrays.

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
    plan = _plan(tensors, metadata, checksum)
    names = list(plan.tensors)
    sources = Sources(
        [tensor.untyped_storage() for tensor in plan.tensors.values()],
        list(plan.tensors.values()),
        lambda index: f"the tensor {names[index]!r}",
    )
    layout = SourceLayout(path, plan.file_bytes, sources)
    if checksum:
        for chunk, (begin, end) in enumerate(plan.chunks()):
            layout.add_checksum_field(
                plan.sums_at + 8 * chunk, layout.add_checksum("crc32c", begin, end), "hex"
            )
    layout.add(0, bytes(plan.head))
    for tensor, begin in zip(plan.tensors.values(), plan.begins, strict=True):
        if tensor.numel():
            layout.add(begin, bytes_of(tensor))
    return layout


def write_to(file: BinaryFile, tensors: Values, *, checksum: bool = True) -> None:
    """Write a safetensors file of `tensors` to an open file. Raises the errors of lay_out()."""
    plan = _plan(tensors, None, checksum)
    if checksum:  # which come first, so that all is read twice
        sums: list[int] = []
        value, at, ends = 0, len(plan.head), [end for _, end in plan.chunks()]
        for part in plan.data():
            view = part
            while len(view):
                take = min(len(view), ends[len(sums)] - at)
                value = _core.crc32c(view[:take], value)
                view, at = view[take:], at + take
                if at == ends[len(sums)]:
                    sums.append(value)
                    value = 0
        digits = "".join(f"{each:08x}" for each in sums).encode()
        plan.head[plan.sums_at : plan.sums_at + len(digits)] = digits
    write_all(file, plan.head)
    for part in plan.data():
        write_all(file, part)


class _Plan(NamedTuple):
    """What a file consists of."""

    head: bytearray  # with zeros in place of the checksums of the data, from `sums_at` on
    sums_at: int
    tensors: dict[str, torch.Tensor]  # contiguous
    begins: list[int]  # of each tensor in the file
    file_bytes: int

    def chunks(self) -> list[tuple[int, int]]:
        """Return the range of each chunk of the data that has a checksum."""
        begins = range(len(self.head), self.file_bytes, checksums.CHUNK_BYTES)
        return [(begin, min(begin + checksums.CHUNK_BYTES, self.file_bytes)) for begin in begins]

    def data(self) -> Iterator[memoryview]:
        """Yield all bytes behind the head, in order."""
        at = len(self.head)
        placed = sorted(zip(self.begins, self.tensors.values(), strict=True), key=lambda each: each[0])
        for begin, tensor in placed:
            if tensor.numel():
                yield memoryview(bytes(begin - at))
                yield memoryview(cast("Buffer", bytes_of(tensor).cpu().numpy()))
                at = begin + tensor.nbytes
        yield memoryview(bytes(self.file_bytes - at))


def _plan(tensors: Values, metadata: Mapping[str, str] | None, checksum: bool) -> _Plan:
    if not isinstance(tensors, Mapping):
        what = f"obj: a .safetensors file holds only tensors by name, and this is a {type(tensors).__name__}"
        is_module = HAS_TORCH and isinstance(tensors, torch.nn.Module)
        raise TypeError(f"{what}{'; save its state_dict()' if is_module else _HINT}")
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
    sums_at = checksums.fill_in(head) if checksum else 0
    return _Plan(head, sums_at, kept, [begin + shift for begin, _ in places], file_bytes + shift)


def _storable(name: Any, tensor: Any) -> torch.Tensor:
    if type(name) is not str:
        raise TypeError(
            f"obj: the keys in a .safetensors file must be str, not {type(name).__name__} ({name!r}){_HINT}"
        )
    if not isinstance(tensor, torch.Tensor | numpy.ndarray):
        raise TypeError(
            f"obj: {name!r} is a {type(tensor).__name__}, and a .safetensors file holds only tensors by name"
            f"{_HINT}"
        )
    if not _is_utf8(name):
        raise ValueError(f"obj: the name {name!r} is not valid UTF-8")
    if not isinstance(tensor, torch.Tensor):
        tensor = tensor_of(tensor, f"the tensor {name!r}")
    why = objection(tensor)
    if why is None and (why := objection_in_pt(tensor.dtype)) is not None:
        raise Unsupported(None, f"the tensor {name!r} {why}")
    if why is None and not in_safetensors(tensor.dtype):
        why = f"has the dtype {tensor.dtype}, which safetensors files do not support"
    if why is None and tensor.dtype is torch.float4_e2m1fn_x2 and tensor.dim() == 0:
        why = f"has the dtype {tensor.dtype} and no dimension, which safetensors files do not support"
    if why is not None:
        # A .pt file would contain only one rank's part of a distributed tensor.
        raise Unsupported(None, f"the tensor {name!r} {why}{_advice(tensor)}")
    return contiguous(tensor)


def _advice(tensor: torch.Tensor) -> str:
    """Return what to do about a tensor that the file cannot hold, if its objection() does not say so."""
    if objection_in_any_file(tensor) or has_own_advice(tensor):
        return ""
    return "; load or initialize it on another device first" if tensor.is_meta else _HINT


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
