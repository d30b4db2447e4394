"""Weights of routed experts: of all experts of a module at once, of which only those in use are in memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trunkline._core import UnitCache
from trunkline._streaming.bound_unit import advised
from trunkline._streaming.layers import QuantisedWeight
from trunkline._streaming.offloaded import OffloadedWeight

_GROUPED = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback"}


class ExpertMemory:
    """The experts of a model in a UnitCache, and the tensors that view them. For one thread at a time."""

    def __init__(self, cache: UnitCache, remedy: str, scratch: Sequence[torch.Tensor] = ()) -> None:
        """`remedy`: what to do about weights that were changed.

        `scratch`: memory in which quantised matrices are dequantised, for each weight of a module.
        """
        self.cache = cache
        self.scratch = scratch
        self._remedy = remedy
        self._bytes = torch.frombuffer(cache.memory, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._held: set[int] = set()  # units that are acquired, or may be, after an interrupt
        self.running: int | None = None  # the group of the module whose forward is running

    def acquire(self, units: Sequence[int]) -> tuple[int, int]:
        """Wait for one of the units; return which, and the byte at which it begins."""
        self._held.update(units)
        with advised(self._remedy):
            unit, begin = self.cache.acquire(units)
        self._held.difference_update(units)
        self._held.add(unit)
        return unit, begin

    def release(self, unit: int) -> None:
        """Let the memory be reused."""
        self.cache.release(unit)
        self._held.discard(unit)

    def holds(self, unit: int) -> bool:
        """Whether the unit is acquired."""
        return unit in self._held

    def release_all(self) -> None:
        """Do so for all units."""
        while self._held:
            with suppress(ValueError):  # it was not acquired
                self.cache.release(self._held.pop())

    def view(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the matrix that begins there."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._bytes[
                : len(self._bytes) // dtype.itemsize * dtype.itemsize
            ].view(dtype)
        return typed.as_strided(shape, (shape[1], 1), begin // dtype.itemsize)

    def bytes_at(self, begin: int, count: int) -> torch.Tensor:
        """Return the bytes that begin there."""
        return self._bytes[begin : begin + count]


@dataclass(frozen=True)
class Dequantised:
    """How the matrices of a weight are dequantised, one after the other, into the same memory."""

    weight: QuantisedWeight
    scratch: torch.Tensor
    record_bytes: int

    def matrix(self, record: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the matrix of which a record holds the stored bytes."""
        made = self.scratch[: self.weight.dequantised_bytes].view(dtype).view(shape)
        self.weight.dequantise([record], made)
        return made


class RoutedMatrices:
    """One matrix of each expert of a module."""

    def __init__(
        self,
        memory: ExpertMemory,
        group: int,
        first: int,
        begins: Sequence[int],
        parameter: nn.Parameter,
        quantised: Dequantised | None = None,
    ) -> None:
        """`group`: the module. `first`: the number of the first expert's unit.

        `begins`: where each begins in its unit's memory. `parameter`: all of them, on the meta device.
        `quantised`: None if they are stored as they are used.
        """
        self._memory = memory
        self._group = group
        self._begins = begins
        self.first = first
        self.count = parameter.shape[0]
        self._dtype = parameter.dtype
        self._shape = tuple(parameter.shape[1:])
        self._quantised = quantised
        self._last: int | None = None  # the unit that one() returned

    @property
    def is_running(self) -> bool:
        """Whether their module's forward is running: they must not be used at other times."""
        return self._memory.running == self._group

    def one(self, expert: int) -> torch.Tensor:
        """Return the matrix of an expert; it is valid until the next call, and while the module runs."""
        self.finish()
        self._last, matrix = self._acquire([self.first + expert])
        return matrix

    def finish(self) -> None:
        """Let the memory of the matrix that one() returned be reused."""
        last, self._last = self._last, None
        if last is not None and self._memory.holds(last):
            self._memory.release(last)

    def gather(self, experts: torch.Tensor) -> torch.Tensor:
        """Return copies of the matrices of these experts, which may be repeated."""
        self.finish()
        made = torch.empty((len(experts), *self._shape), dtype=self._dtype)
        rows: dict[int, list[int]] = {}
        for row, expert in enumerate(experts.tolist()):
            rows.setdefault(self.first + self._valid(expert), []).append(row)
        while rows:
            unit, matrix = self._acquire(list(rows))
            for row in rows.pop(unit):
                made[row].copy_(matrix)
            self._memory.release(unit)
        return made

    def multiply(self, rows: torch.Tensor, offsets: torch.Tensor, is_transposed: bool) -> torch.Tensor:
        """Multiply rows, those of each expert until its offset, by the expert's matrix.

        Does for each expert what torch's grouped_mm does on a CPU. Experts in memory come first.
        """
        self.finish()
        width = self._shape[0] if is_transposed else self._shape[1]
        made = rows.new_empty((rows.shape[0], width))
        spans: dict[int, tuple[int, int]] = {}
        begin = 0
        for expert, end in enumerate(offsets.tolist()):
            if end > begin:
                spans[self.first + expert] = begin, end
            begin = end
        while spans:
            unit, matrix = self._acquire(list(spans))
            begin, end = spans.pop(unit)
            torch.mm(rows[begin:end], matrix.t() if is_transposed else matrix, out=made[begin:end])
            self._memory.release(unit)
        return made

    def one_of(self, index: Any) -> torch.Tensor | None:
        """Return the matrix of the expert `index`; None unless that is a number."""
        if isinstance(index, torch.Tensor):
            if index.dim() != 0 or index.dtype not in (torch.int64, torch.int32):
                return None
            index = index.item()
        return self.one(self._valid(index)) if type(index) is int else None

    def _acquire(self, units: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Wait for one of the units; return which, and the matrix."""
        unit, begin = self._memory.acquire(units)
        begin += self._begins[unit - self.first]
        if self._quantised is None:
            return unit, self._memory.view(begin, self._dtype, self._shape)
        record = self._memory.bytes_at(begin, self._quantised.record_bytes)
        return unit, self._quantised.matrix(record, self._dtype, self._shape)

    def _valid(self, expert: int) -> int:
        if not -self.count <= expert < self.count:
            raise IndexError(f"expert {expert} of {self.count}")
        return expert % self.count


class RoutedWeight(OffloadedWeight):
    """One matrix of each of a module's experts; each is in memory while something computes with it."""

    matrices: RoutedMatrices
    is_transposed: bool

    @classmethod
    def routed(cls, path: str, parameter: nn.Parameter, matrices: RoutedMatrices) -> "RoutedWeight":
        """Return what stands for `parameter`, called `path` in its model."""
        made = cls.of(path, parameter, torch.device("cpu"))
        assert isinstance(made, cls)
        made.matrices = matrices
        made.is_transposed = False
        return made

    def _transposed(self) -> "RoutedWeight":
        with torch._C.DisableTorchFunctionSubclass():
            data = self.data.transpose(1, 2)
        made = RoutedWeight.routed(self.path, data, self.matrices)  # type: ignore[arg-type]
        made.is_transposed = not self.is_transposed
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with the experts that are named, as the implementations of transformers do.

        Outside of the module's forward this raises Unsupported, as for any other weight: what would be
        returned is memory of the cache, which is soon reused, and which a caller could change.
        """
        name = getattr(func, "__name__", str(func))
        if name == "__getitem__" and not args[0].is_transposed and args[0].matrices.is_running:
            found = _selected(args[0].matrices, args[1])
            if found is not None:
                return found
        elif name == "transpose" and sorted(dim % 3 for dim in args[1:]) == [1, 2]:
            return args[0]._transposed()
        elif name in _GROUPED and len(args) == 2 and isinstance(args[1], cls) and args[1].matrices.is_running:
            others = dict(kwargs or {})
            offsets = others.pop("offs", None)
            if offsets is not None and all(value is None for value in others.values()):
                return args[1].matrices.multiply(args[0], offsets, args[1].is_transposed)
        return super().__torch_function__(func, types, args, kwargs)


def _selected(matrices: RoutedMatrices, index: Any) -> torch.Tensor | None:
    if isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32):
        return matrices.gather(index)
    return matrices.one_of(index)
