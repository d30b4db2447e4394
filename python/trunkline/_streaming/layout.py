"""Where the tensors of a pack lie: units one behind the other, each tensor where memory wants it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trunkline import _core
from trunkline._streaming.stored import TENSOR_ALIGNMENT, Stored
from trunkline._tensor_io.tensors import dtype_name

ALIGNMENT = 4096  # of the data, and of what is read as a whole
_PADDING = "trunkline.padding."
MARK = "trunkline.pack"  # in the metadata: the file is ours, to be made anew and removed


@dataclass(frozen=True)
class Layout:
    """A safetensors file: what stands before its data, and where each tensor is."""

    head: bytes
    tensors: list[Stored]
    nbytes: int


def lay_out(tensors: Sequence[Stored], starts: set[str]) -> Layout:
    """Lay tensors out in their order, each with the `misalignment` that it is given with.

    Those whose names are in `starts` begin with a page, or so far into it. The format allows no gaps, so what
    they are filled with is tensors too.
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
