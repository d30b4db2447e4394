"""Where the tensors of a pack are: unit after unit, each tensor aligned as it is to be in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trunkline import _core
from trunkline._streaming.stored import TENSOR_ALIGNMENT, FileTensor
from trunkline._tensor_io.tensors import dtype_name

ALIGNMENT = 4096  # of the data, and of each unit
_PADDING = "trunkline.padding."
MARK = "trunkline.pack"  # in the metadata: the file is a pack, which may be replaced and removed


@dataclass(frozen=True)
class Layout:
    """A safetensors file: `head`, the bytes before its data, and where each tensor is."""

    head: bytes
    tensors: list[FileTensor]
    nbytes: int


def lay_out(tensors: Sequence[FileTensor], starts: set[str]) -> Layout:
    """Lay tensors out in their order, each with its own `misalignment`.

    Those whose names are in `starts` begin a page, or that far into it. The format allows no gaps, so padding
    is stored as tensors too.
    """
    described: list[tuple[str, str, tuple[int, ...]]] = []
    at = 0

    for stored in tensors:
        multiple = ALIGNMENT if stored.name in starts else TENSOR_ALIGNMENT
        if missing := (stored.misalignment - at) % multiple:
            described.append((f"{_PADDING}{len(described)}", "U8", (missing,)))
            at += missing
        described.append((stored.name, dtype_name(stored.dtype), stored.shape))
        at += stored.nbytes
    metadata = {"format": "pt", MARK: "1"}
    head, places, nbytes = _core.lay_out_safetensors(described, metadata, ALIGNMENT, keep_order=True)
    begins = {name: begin for (name, _, _), (begin, _) in zip(described, places, strict=True)}
    return Layout(head, [replace(stored, file=0, offset=begins[stored.name]) for stored in tensors], nbytes)
