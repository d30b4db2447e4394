"""Lays out safetensors files of stored tensors, with checksums of their own."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trunkline import _core
from trunkline._errors import Unsupported
from trunkline._export.lazy_state import LazyState, memory_of
from trunkline._export.output import Output, Placed, Sum
from trunkline._formats.safetensors import checksums
from trunkline._formats.safetensors.layout import ALIGNMENT, padded
from trunkline._tensor_io.tensors import dtype_name, in_safetensors

_MAX_NAMED = 8


@dataclass(frozen=True)
class FlatTensors:
    """The tensors of a state by name, and the names that tied ones have beside the one that is kept."""

    tensors: dict[str, torch.Tensor]
    dropped: dict[str, str]  # the name that is kept, by the one that is not


def flat_tensors(state: LazyState) -> FlatTensors:
    """Return what a safetensors file can hold of a state: tensors by name, those of nested dicts with dots.

    Of tensors that are the same memory one name is kept, the first, as transformers does it. Raises
    Unsupported, naming the keys, for anything but tensors, for dtypes that the format lacks, and for tensors
    that overlap otherwise.
    """
    found: dict[str, torch.Tensor] = {}
    others: list[str] = []
    if isinstance(state.value, torch.Tensor):
        raise Unsupported(
            None,
            f"tensors in safetensors files have names, and {state.source} is one tensor without a name: pass "
            "the key above it (key=), or name a file that ends with .pt",
        )
    _walk(state.value, "", found, others)
    if others:
        raise _not_tensors(state, others)
    foreign = [name for name, tensor in found.items() if not in_safetensors(tensor.dtype)]
    if foreign:
        raise Unsupported(
            None,
            f"safetensors files have no {found[foreign[0]].dtype}, the dtype of {_listed(foreign)} in "
            f"{state.source}; name a file that ends with .pt, or export another part of the state (key=)",
        )
    for name, tensor in found.items():
        if not tensor.is_contiguous() and state.placeholders.find(tensor.data_ptr()) is not None:
            raise Unsupported(
                None,
                f"{name!r} of {state.source} is a view with gaps of memory that other tensors share; "
                "name a file that ends with .pt, which holds it as it is",
            )
    return _without_ties(found, state)


def _walk(value: Any, prefix: str, found: dict[str, torch.Tensor], others: list[str]) -> None:
    if not isinstance(value, Mapping):
        others.append(prefix or "the state itself")
        return
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping):
            _walk(item, name, found, others)
        elif type(key) is not str or not isinstance(item, torch.Tensor):
            others.append(name)
        elif name in found:
            raise Unsupported(
                None, f"two tensors would both be named {name!r}; export a part of the state (key=)"
            )
        else:
            found[name] = item.detach()


def _not_tensors(state: LazyState, others: Sequence[str]) -> Unsupported:
    usable = []
    if isinstance(state.value, Mapping):
        for key, item in state.value.items():
            inner: list[str] = []
            if isinstance(key, str) and isinstance(item, Mapping) and item:
                _walk(item, "", {}, inner)
                usable += [] if inner else [key]
    hint = "; name a file that ends with .pt"
    if usable:
        hint += f", or export only the tensors below one key: {' or '.join(map(_as_argument, usable[:4]))}"
    else:
        hint += ", or export a part of the state that has only tensors (key=)"
    verb = "are" if len(others) > 1 else "is"
    return Unsupported(
        None,
        f"safetensors files hold only tensors, but {_listed(others)} of {state.source} {verb} not: "
        f"{hint.removeprefix('; ')}",
    )


def _as_argument(key: str) -> str:
    return f'key="{key}"'


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(repr, names[:_MAX_NAMED])) + more


def _without_ties(found: dict[str, torch.Tensor], state: LazyState) -> FlatTensors:
    kept: dict[str, torch.Tensor] = {}
    dropped: dict[str, str] = {}
    by_memory: dict[tuple[Any, ...], str] = {}
    for name, tensor in found.items():
        same = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first = by_memory.setdefault(same, name) if tensor.nbytes else name
        if first == name:
            kept[name] = tensor
        else:
            dropped[name] = first
    spans = sorted((*_span(tensor), name) for name, tensor in kept.items() if tensor.nbytes)
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise Unsupported(
                None,
                f"{name!r} and {other!r} of {state.source} share a part of their memory, which safetensors "
                "files do not support; name a file that ends with .pt, or save copies (tensor.clone())",
            )
    return FlatTensors(kept, dropped)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def shape_in_file(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in elements of the format: torch counts a pair of 4-bit elements as one."""
    shape = tuple(tensor.shape)
    return (*shape[:-1], 2 * shape[-1]) if tensor.dtype is torch.float4_e2m1fn_x2 else shape


def safetensors_output(
    state: LazyState, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Output:
    """Lay out a file of the tensors, some of them placeholders of `state`, with a CRC-32C of each MiB."""
    described = [(name, dtype_name(tensor.dtype), shape_in_file(tensor)) for name, tensor in tensors.items()]
    data_bytes = sum(tensor.nbytes for tensor in tensors.values())
    entries = {**metadata, checksums.KEY: checksums.placeholder(data_bytes)}
    head_bytes, places, file_bytes = _core.lay_out_safetensors(described, entries, ALIGNMENT)
    head = bytearray(head_bytes)
    shift = 0
    if not head.endswith(b" " * checksums.MIN_PADDING):
        shift = ALIGNMENT
        head = padded(head, shift)
    nbytes = file_bytes + shift
    sums_at = checksums.fill_in(head)
    placed = [Placed(0, len(head), bytes(head))]
    for tensor, (begin, _) in zip(tensors.values(), places, strict=True):
        if tensor.nbytes:
            stored = state.content_of(tensor.data_ptr(), tensor.nbytes)
            placed.append(Placed(begin + shift, tensor.nbytes, stored or memory_of(tensor)))
    placed.sort(key=lambda each: each.offset)
    sums = [
        Sum("crc32c", begin, min(begin + checksums.CHUNK_BYTES, nbytes))
        for begin in range(len(head), nbytes, checksums.CHUNK_BYTES)
    ]

    def fields(values: Sequence[int]) -> list[tuple[int, bytes]]:
        return [(sums_at, "".join(f"{value:08x}" for value in values).encode())]

    return Output(nbytes, placed, sums, fields)
