"""How the items that a rank saves are divided among data files, and laid out in them."""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from trunkline._core import FileLayout
from trunkline._errors import Unsupported
from trunkline._logging import Log
from trunkline._tensor_io.memory import is_in_reach
from trunkline._tensor_io.tensors import bytes_of
from trunkline.dcp._stored import ALIGNMENT, CHUNK_BYTES, SMALL_ALIGNMENT

# Copies of tensors that are not contiguous, or on devices that cannot be written from, are kept until their
# file is written. If they need more bytes than this, another file is begun.
MAX_COPIED_BYTES = 1 << 30

_log = Log("checkpoint")


@dataclass(frozen=True)
class ItemBytes:
    """An item, and memory that holds its bytes."""

    item: WriteItem
    memory: "torch.Tensor | memoryview"  # one dimension, uint8
    nbytes: int
    copied: bool  # the memory is a copy, held only by this object
    dtype: str | None
    shape: tuple[int, ...] | None


def groups_of(items: Iterable[WriteItem], planner: SavePlanner) -> Iterator[list[ItemBytes]]:
    """Resolve items in groups, whose copies need at most MAX_COPIED_BYTES."""
    group: list[ItemBytes] = []
    copied = 0
    for item in items:
        part = _bytes_of(item, planner.resolve_data(item))
        copied += part.nbytes if part.copied else 0
        if copied > MAX_COPIED_BYTES and group:
            yield group
            group, copied = [], part.nbytes
        group.append(part)
    if group:
        yield group


def _bytes_of(item: WriteItem, data: "torch.Tensor | io.BytesIO") -> ItemBytes:
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"{name}: the planner must return a BytesIO, not {type(data).__name__}")
        view = data.getbuffer()
        return ItemBytes(item, view, view.nbytes, True, None, None)
    tensor = strided_tensor(name, data)
    plain = plain_tensor(name, tensor)
    memory = bytes_of(plain)
    copied = plain.nbytes > 0 and plain.data_ptr() != tensor.data_ptr()
    if copied:
        _log.debug("%s is copied before it is written: it is on %s, or not contiguous", name, tensor.device)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ItemBytes(item, memory, memory.numel(), copied, dtype, tuple(tensor.shape))


def strided_tensor(name: str, data: Any) -> torch.Tensor:
    """Return a tensor that can be stored, detached. Raises TypeError and Unsupported, naming it."""
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{name}: the planner must return a tensor, not {type(data).__name__}")
    tensor = data.detach()
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        shown = f"a {type(data).__name__} of layout {tensor.layout} and {tensor.dtype}"
        raise Unsupported(
            None, f"{name}: {shown} cannot be stored; save its parts as plain, strided tensors", None
        )
    if tensor.is_meta:
        raise Unsupported(None, f"{name}: a tensor on the meta device has no data to store", None)
    return tensor


def plain_tensor(name: str, data: Any) -> torch.Tensor:
    """Return its elements, contiguous, where the engine reaches them: the tensor itself, or a copy."""
    tensor = strided_tensor(name, data)
    near = tensor if is_in_reach(tensor.device) else tensor.cpu()
    return near.resolve_conj().resolve_neg().contiguous()


def spread(group: list[ItemBytes], count: int, first: int) -> list[list[ItemBytes]]:
    """Distribute items as spread_sizes() does."""
    shares = spread_sizes([part.nbytes for part in group], count, first)
    return [[group[number] for number in share] for share in shares]


def spread_sizes(sizes: Sequence[int], count: int, first: int = 0) -> list[list[int]]:
    """Distribute by bytes: the largest first, each to the file with the fewest; ties begin with `first`.

    Returns the indexes of the sizes, ascending, for each file.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = min(range(count), key=lambda at: (loads[at], (at - first) % count))
        shares[least].append(number)
        loads[least] += sizes[number]
    return [sorted(share) for share in shares]


def lay_out(share: list[ItemBytes]) -> tuple[int, list[int]]:
    """Return the size of the file, and the offset of each item: first aligned items, then small ones."""
    offsets = [0] * len(share)
    end = 0
    for alignment in (ALIGNMENT, SMALL_ALIGNMENT):
        for number, part in enumerate(share):
            if part.nbytes > 0 and (part.nbytes >= ALIGNMENT) == (alignment == ALIGNMENT):
                offsets[number] = -(-end // alignment) * alignment
                end = offsets[number] + part.nbytes
    return end, offsets


def layout_of(path: str, nbytes: int, share: list[ItemBytes], offsets: list[int]) -> FileLayout:
    """Describe the file to write, with its checksums."""
    layout = FileLayout(path, nbytes)
    for part, offset in zip(share, offsets, strict=True):
        if part.nbytes > 0:
            layout.add(offset, part.memory)
    for begin in range(0, nbytes, CHUNK_BYTES):
        layout.add_checksum("crc32c", begin, min(begin + CHUNK_BYTES, nbytes))
    return layout


def packed(sums: list[int]) -> bytes:
    """Return checksums as DataFile has them."""
    return b"".join(value.to_bytes(4, "little") for value in sums)
