"""Which tensors and values of two checkpoints or files differ, and by how much."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch

from trunkline import _core
from trunkline._checkpoint_tools.source import find_source, open_state
from trunkline._core import Engine
from trunkline._export.lazy_state import LazyState, at_key
from trunkline._export.placeholders import Placeholders
from trunkline._export.window import Part, WindowReader
from trunkline._progress import Progress
from trunkline._tensor_io.tensors import dtype_name
from trunkline.checkpoint.load import load

_WINDOW_BYTES = 32 << 20  # of each side
_INTEGERS = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
}
_FILES = ("safetensors", "folder", "file")


@dataclass
class TensorDifference:
    """A tensor that differs.

    `elements`: how many do; None where the shapes differ. `max_abs`: None if the difference is not a number.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[list[int], list[int]]
    elements: int | None = None
    total: int | None = None
    max_abs: float | None = None


@dataclass
class Difference:
    """How `a` and `b` differ; the names are those of nested keys with dots between them.

    Where several tensors or values have the same one, each is named by its keys: "['a']['b']".
    """

    a: str
    b: str
    compared: int = 0  # tensors in both
    tensors: list[TensorDifference] = field(default_factory=list)
    values: list[str] = field(default_factory=list)  # that are not tensors
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (self.tensors or self.values or self.only_a or self.only_b)

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"same": self.is_same, **asdict(self)}


def compare(
    a: "str | os.PathLike[str]",
    b: "str | os.PathLike[str]",
    *,
    key: str | None = None,
    engine: Engine | None = None,
) -> Difference:
    """Compare two checkpoints or files: directories (their last checkpoint), folders of a step, DCP, files.

    `key`: compare what is below it. Files and folders of safetensors are compared as a whole all the same, so
    that an export can be compared with its checkpoint. Checkpoints are read window by window, and verified;
    .pt and .safetensors files are mapped. A name that is
    tied to a common one counts as common, since safetensors files have only one. NaN equals NaN.
    """
    first, second = (_open(each, key, engine) for each in (a, b))
    result = Difference(first.source, second.source)
    ours, theirs = _named_leaves(first.value, second.value)
    result.only_a, result.only_b = _only_in(ours, theirs), _only_in(theirs, ours)
    both = [name for name in ours if name in theirs]
    total = sum(ours[name].nbytes for name in both if isinstance(ours[name], torch.Tensor))
    progress = Progress("comparing", total)
    try:
        with WindowReader(engine) as reader:
            reader.hold([*first.stored, *second.stored])
            comparison = _Comparison((first, second), reader, progress)
            for name in both:
                one, other = ours[name], theirs[name]
                if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                    result.compared += 1
                    found = comparison.tensors(name, one, other)
                    result.tensors += [found] if found else []
                elif not _are_same(one, other):
                    result.values.append(name)
    finally:
        progress.close()
    return result


def _only_in(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names that only one side has, without those that are tied to a tensor of a common name."""
    common = {
        (value.data_ptr(), value.shape, value.stride())
        for name, value in ours.items()
        if name in theirs and isinstance(value, torch.Tensor) and value.nbytes
    }
    return [
        name
        for name, value in ours.items()
        if name not in theirs
        and not (
            isinstance(value, torch.Tensor) and (value.data_ptr(), value.shape, value.stride()) in common
        )
    ]


def _open(path: "str | os.PathLike[str]", key: str | None, engine: Engine | None) -> LazyState:
    source = find_source(path)
    if source.kind not in _FILES:
        return open_state(source, key=key, engine=engine)
    value = load(source.path, mmap=True, engine=engine)
    if source.kind == "file":
        value = at_key(value, key, source.path)
    return LazyState(value, Placeholders([]), [], [], source.path)


def _named_leaves(*values: Any) -> list[dict[str, Any]]:
    """Return the leaves of each value by name.

    Where several in a value have the same name, as of {"a": {"b": 1}, "a.b": 2}, they are named by their
    keys as Python shows them ("['a']['b']"), in all values.
    """
    leaves = [list(_leaves(value)) for value in values]
    shared = {
        name
        for each in leaves
        for name, count in Counter(_dotted(keys) for keys, _ in each).items()
        if count > 1
    }

    def name_of(keys: tuple[Any, ...]) -> str:
        name = _dotted(keys)
        return "".join(f"[{key!r}]" for key in keys) if name in shared else name

    return [{name_of(keys): leaf for keys, leaf in each} for each in leaves]


def _dotted(keys: tuple[Any, ...]) -> str:
    name = ""
    for key in keys:
        name = f"{name}.{key}" if name else str(key)
    return name


def _leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield leaves, and empty containers, by the keys that lead to it."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = list(enumerate(value))
    if not items:
        yield keys, value
    for key, item in items:
        yield from _leaves(item, (*keys, key))


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    try:
        same = one == other or (one != one and other != other)  # the latter: NaN
        return bool(same.all() if hasattr(same, "all") else same)
    except (ValueError, TypeError):
        return False


class _Comparison:
    """Compares tensors of two states, of which some are placeholders, through two windows."""

    def __init__(self, states: tuple[LazyState, LazyState], reader: WindowReader, progress: Progress) -> None:
        self._states = states
        self._reader = reader
        self._progress = progress
        self._windows = [_core.aligned_empty(_WINDOW_BYTES) for _ in states]

    def tensors(self, name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference | None:
        """Return how they differ; None if they do not."""
        found = TensorDifference(
            name,
            (dtype_name(one.dtype), dtype_name(other.dtype)),
            (list(one.shape), list(other.shape)),
        )
        if one.shape != other.shape:
            self._progress.add(one.nbytes)
            return found
        count = one.numel()
        found.elements, found.total, found.max_abs = 0, count, None
        for left_block, right_block in _blocks(one, other):
            left = self._elements(0, left_block, name)
            right = self._elements(1, right_block, name)
            elements, largest = _differing(left, right)
            found.elements += elements
            if largest is not None:
                found.max_abs = largest if found.max_abs is None else max(found.max_abs, largest)
            self._progress.add(left_block.numel() * one.itemsize)
        return found if found.elements or one.dtype != other.dtype else None

    def _elements(self, side: int, block: torch.Tensor, name: str) -> torch.Tensor:
        """Return the elements in one dimension, in the order of their indices."""
        state = self._states[side]
        at = state.placeholders.find(block.data_ptr())
        if at is None:
            return block.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        index, offset = at
        extent = _extent_of(block)
        memory = torch.frombuffer(self._windows[side], dtype=torch.uint8)[:extent]
        stored = state.stored[index]
        if stored.has_gaps:
            memory.zero_()
        self._reader.read([Part(stored, offset, offset + extent, memory.data_ptr(), name)], memory)
        strided = memory.view(block.dtype).as_strided(block.shape, block.stride())
        return strided.contiguous().reshape(-1)


def _blocks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same parts of two tensors of one shape, small enough for the windows."""
    if one.numel() == 0:
        return
    large = [
        each for each in (one, other) if max(_extent_of(each), each.numel() * each.itemsize) > _WINDOW_BYTES
    ]
    if not large:
        yield one, other
        return
    shape, strides = large[0].shape, large[0].stride()
    # Along what makes its elements be far apart; along the most elements if they share memory (expand()).
    dim = max(range(len(shape)), key=lambda dim: ((shape[dim] - 1) * strides[dim], shape[dim]))
    if shape[dim] < 2 or _extent_of(large[0]) <= _WINDOW_BYTES:
        dim = max(range(len(shape)), key=lambda dim: shape[dim])
    half = shape[dim] // 2
    for begin, length in ((0, half), (half, shape[dim] - half)):
        yield from _blocks(one.narrow(dim, begin, length), other.narrow(dim, begin, length))


def _extent_of(tensor: torch.Tensor) -> int:
    """Return how many bytes there are from the first element to the end of the last, of at least one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _differing(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float | None]:
    """Return how many elements differ, and by how much at most; None where that is not a number."""
    if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return 0, None
    if one.dtype in _INTEGERS and other.dtype in _INTEGERS:
        return _differing_integers(one.numpy(), other.numpy())
    if one.is_complex() or other.is_complex():
        wide = torch.complex128
    elif one.dtype.is_floating_point or other.dtype.is_floating_point or one.dtype != other.dtype:
        wide = torch.float64
    else:
        wide = one.dtype
    try:
        left, right = one.to(wide), other.to(wide)
        differs = left != right
        if wide.is_floating_point or wide.is_complex:
            differs &= ~(left.isnan() & right.isnan())
    except (RuntimeError, NotImplementedError, TypeError):  # a dtype that torch cannot compare
        pairs = (one.view(torch.uint8) != other.view(torch.uint8)).reshape(one.numel(), -1)
        return int(pairs.any(dim=1).sum()), None
    count = int(differs.sum())
    if count == 0:
        return 0, None
    number = torch.complex128 if wide.is_complex else torch.float64
    largest = (left[differs].to(number) - right[differs].to(number)).abs()
    finite = largest[largest.isfinite()]
    return count, float(finite.max()) if len(finite) else None


def _differing_integers(one: "numpy.ndarray", other: "numpy.ndarray") -> tuple[int, float | None]:
    """Return how many integers differ, and by how much at most; float64 cannot represent large ones."""
    # In two's complement, integers of the same sign are ordered as their bits are.
    left, right = one.astype(numpy.uint64), other.astype(numpy.uint64)
    same_sign = (one < 0) == (other < 0)
    differs = (left != right) | ~same_sign
    count = int(differs.sum())
    if count == 0:
        return 0, None
    near = differs & same_sign
    largest = numpy.max(numpy.maximum(left, right)[near] - numpy.minimum(left, right)[near], initial=0)
    far = numpy.abs(one[~same_sign].astype(numpy.float64) - other[~same_sign].astype(numpy.float64))
    return count, max(float(largest), float(numpy.max(far, initial=0.0)))
