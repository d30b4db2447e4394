"""How fast a streamed model can be: bounded by bytes over bandwidth, or by computing."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trunkline import _core
from trunkline._errors import OutOfBudget

PAGE_BYTES = 4096
_BISECTIONS = 40

# Seconds that a pass computes: (bytes of weights, rows in the batch).
Compute = Callable[[int, int], float]


@dataclass(frozen=True)
class ExpertSizes:
    """The routed experts of a layer: how many there are, and the bytes of each matrix of one of them."""

    count: int
    per_token: int  # how many of them a token uses
    matrix_bytes: tuple[int, ...]
    expanded_bytes: int = 0  # by how much one of them is larger once it is dequantised

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, as it is stored."""
        return sum(self.matrix_bytes)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights: those that always stay in memory, and the units that may be streamed.

    `experts`: weights apart from these, which are read as tokens are routed to them.
    """

    resident_bytes: int
    unit_bytes: tuple[int, ...]
    unit_weights: tuple[int, ...] = ()  # how many weights each unit holds; (): one each
    experts: tuple[ExpertSizes, ...] = ()
    prompt_bytes: int = 0  # of those that stay: used only by the prompt, such as a vision tower
    scratch_bytes: int = 0  # of those that stay: memory for dequantised weights, besides the weights
    expanded_bytes: int = 0  # by how much quantised weights are larger once they are dequantised
    unrouted_bytes: int = 0  # of the units: experts that a token does not use

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights but routed experts."""
        return self.resident_bytes - self.scratch_bytes + sum(self.unit_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.dense_bytes + sum(each.count * each.expert_bytes for each in self.experts)

    @property
    def active_bytes(self) -> int:
        """Bytes of the weights that a generated token uses, as it computes with them."""
        dense = self.dense_bytes - self.prompt_bytes + self.expanded_bytes - self.unrouted_bytes
        return dense + sum(
            each.per_token * (each.expert_bytes + each.expanded_bytes) for each in self.experts
        )

    @property
    def least_cache_bytes(self) -> int:
        """The least memory for experts."""
        return least_cache_bytes(
            [(each.count, nbytes) for each in self.experts for nbytes in each.matrix_bytes]
        )

    @property
    def cache_bytes_of_a_step(self) -> int:
        """Room for the experts that a token uses in one layer, and two more."""
        return self.least_cache_bytes // 2 * (max((each.per_token for each in self.experts), default=0) + 2)

    @property
    def least_budget(self) -> int:
        """The smallest memory_budget that is accepted."""
        counts = self.unit_weights or (1,) * len(self.unit_bytes)
        most = [max_unit_bytes(nbytes, count) for nbytes, count in zip(self.unit_bytes, counts, strict=True)]
        return self.resident_bytes + slots_bytes(most) + self.least_cache_bytes


@dataclass(frozen=True)
class Rate:
    """How long one step (a token for each row of the batch) takes, in seconds, and what bounds it."""

    batch_size: int
    storage_seconds: float
    compute_seconds: float
    bus_seconds: float = 0.0  # copying weights from main memory to a GPU

    @property
    def seconds(self) -> float:
        """Duration of the step: reading, copying and computing overlap."""
        return max(self.storage_seconds, self.bus_seconds, self.compute_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows together."""
        return self.batch_size / self.seconds if self.seconds else float("inf")

    @property
    def bound(self) -> str:
        """What takes longest: "storage", "bus" or "compute"."""
        if self.storage_seconds >= max(self.bus_seconds, self.compute_seconds):
            return "storage"
        return "bus" if self.bus_seconds >= self.compute_seconds else "compute"


def max_unit_bytes(nbytes: int, weights: int) -> int:
    """Return the most memory that a unit with `nbytes` in this many weights can need.

    In memory each weight has the same offset in its page as in its file. So a unit can need up to a page more
    for each weight, depending on the pack and the unit_bytes that it was made for. The least budget must be
    one number for all of them, since the error names it before the pack is known.
    """
    return nbytes + weights * PAGE_BYTES


def paged_bytes(unit_bytes: Sequence[int]) -> int:
    """Return how much memory all units need, each in whole pages."""
    return sum(_whole_pages(nbytes) for nbytes in unit_bytes)


def slots_bytes(unit_bytes: Sequence[int]) -> int:
    """Return the least memory that units need: two slots of the largest one, or room for all of them."""
    return min(paged_bytes(unit_bytes), 2 * _whole_pages(max(unit_bytes, default=0)))


def least_cache_bytes(matrices: Sequence[tuple[int, int]]) -> int:
    """Return the least memory for experts: two of each size, or all of them.

    `matrices`: how many there are of a size, and the size, in any order.
    """
    counts: dict[int, int] = {}
    for count, nbytes in matrices:
        counts[nbytes] = counts.get(nbytes, 0) + count
    return sum(min(2, count) * _whole_pages(max_unit_bytes(nbytes, 1)) for nbytes, count in counts.items())


def split_memory(budget: int, dense_bytes: Sequence[int], least: int, wanted: int) -> int:
    """Return how much of `budget` experts get; the other units, of these sizes in memory, get the rest.

    Those are used for each token, so they stay in memory before experts do. `least`: of the experts. But they
    get `wanted`, which is room for the experts of one token and layer, before the others get more than their
    least.
    """
    room = budget - slots_bytes(dense_bytes)
    return max(least, budget - paged_bytes(dense_bytes), min(wanted, room))


_AHEAD_BYTES = 64 << 20  # more in flight does not make disks faster
_MOST = 0.9


def units_ahead(per_token: int, unit_bytes: int, slots: int) -> int:
    """Return how many units of each pool of experts are read ahead.

    `per_token`: experts that a token uses. `unit_bytes`: of the largest unit. `slots`: of the smallest pool.
    """
    return max(per_token, min(_AHEAD_BYTES // unit_bytes, slots // 4))


def uses_most(used: int, count: int) -> bool:
    """Return whether a step with `used` of a layer's `count` experts will use most of the next layer's."""
    return used >= _MOST * count


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def streamed_bytes(sizes: Sizes, memory_budget: int) -> int:
    """Return how many bytes each pass reads with that budget. Raises OutOfBudget, naming the least."""
    return sum(passing_units(sizes, memory_budget))


# On a GPU: one in use, one that is being filled, one that is filled next.
GPU_SLOTS = 3


@dataclass(frozen=True)
class GpuMemory:
    """How many bytes of a model's weights a GPU and main memory may hold."""

    budget: int
    host_bytes: int


_BARE_NUMBER = 1024  # of bytes; nobody means so few


def given_bytes(nbytes: int) -> str:
    """Return the text for a size that is too small."""
    return f'{nbytes} bytes (did you mean "{nbytes}GB"?)' if nbytes < _BARE_NUMBER else f"{nbytes} bytes"


def least_text(argument: str, nbytes: int) -> str:
    """Return the least value of an argument, also as it can be passed."""
    unit, name = (10**3, "kB") if nbytes < 10**8 else (10**6, "MB")
    return f'the least is {nbytes} bytes: pass {argument}="{-(-nbytes // unit)}{name}"'


def gpu_streams(sizes: Sizes, memory: GpuMemory) -> tuple[int, int]:
    """Return how many bytes each pass copies to the GPU, and how many of them it reads from storage.

    Raises OutOfBudget, naming the least.
    """
    copied = passing_units(sizes, memory.budget, GPU_SLOTS)
    least = slots_bytes(copied)
    if memory.host_bytes < least:
        raise OutOfBudget(
            None,
            f"host_memory: {given_bytes(memory.host_bytes)} cannot hold two of the units that are streamed "
            f"through main memory to the GPU; {least_text('host_memory', least)}",
        )
    return sum(copied), sum(_passing(copied, memory.host_bytes, 2))


def passing_units(sizes: Sizes, memory_budget: int, slots: int = 2) -> list[int]:
    """Return the sizes of the units that are streamed with that budget; the others stay in memory.

    Raises OutOfBudget, naming the least.
    """
    least = sizes.least_budget
    if memory_budget < least:
        raise OutOfBudget(
            None,
            f"memory_budget: {given_bytes(memory_budget)} cannot hold the weights that stay in memory "
            f"({sizes.resident_bytes} bytes) and two units; {least_text('memory_budget', least)}",
        )
    room = memory_budget - sizes.resident_bytes - cache_bytes(sizes, memory_budget)
    return _passing(sizes.unit_bytes, room, slots)


def _passing(unit_bytes: Sequence[int], memory_bytes: int, slots: int) -> list[int]:
    if not unit_bytes:
        return []
    placed = _core.place_units(unit_bytes, memory_bytes, slots)
    return [nbytes for nbytes, stays in zip(unit_bytes, placed["resident"], strict=True) if not stays]


def cache_bytes(sizes: Sizes, memory_budget: int) -> int:
    """Return how much memory experts get of a budget that is not too small."""
    if not sizes.experts:
        return 0
    room = memory_budget - sizes.resident_bytes
    return split_memory(room, sizes.unit_bytes, sizes.least_cache_bytes, sizes.cache_bytes_of_a_step)


def expert_bytes_read(sizes: Sizes, memory: int, rows: int, skew: float) -> tuple[float, float]:
    """Return the bytes of experts that a step of `rows` tokens reads, and those that it uses.

    The experts used most are in `memory`. Tokens choose among the experts of a layer independently, uniformly
    for a `skew` of 0, else by a Zipf distribution with that exponent.
    """
    total = sum(each.count * each.expert_bytes for each in sizes.experts)
    share = min(1.0, memory / total) if total else 1.0
    read = used = 0.0
    for each in sizes.experts:
        cached = share * each.count
        for rank, probability in enumerate(_probabilities(each.count, each.per_token, skew)):
            nbytes = each.expert_bytes * (1 - (1 - probability) ** rows)
            used += nbytes
            read += nbytes * min(1.0, max(0.0, rank + 1 - cached))
    return read, used


@functools.cache
def _probabilities(count: int, per_token: int, skew: float) -> list[float]:
    """Return for each of `count` experts, the most popular first, how probable it is that a token uses it.

    A draw without replacement takes the experts in the order in which exponential clocks of these rates ring.
    So an expert is used whose clock rings until a time at which, on average, as many as are used have rung.
    """
    if per_token >= count:
        return [1.0] * count
    weights = [(rank + 1) ** -skew for rank in range(count)]

    def rung(time: float) -> list[float]:
        return [-math.expm1(-weight * time) for weight in weights]

    low, high = 0.0, 1.0
    while sum(rung(high)) < per_token:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(rung(middle)) < per_token else (low, middle)
    return rung(high)


def rate(
    sizes: Sizes,
    memory_budget: int,
    bandwidth: float,
    batch_size: int,
    compute: Compute,
    expert_bytes: float = 0.0,
) -> Rate:
    """Return the rate of decoding.

    `bandwidth`: of the storage, in bytes per second. `expert_bytes`: of experts, read in each step.
    """
    read = streamed_bytes(sizes, memory_budget) + expert_bytes
    return Rate(batch_size, read / bandwidth, compute(sizes.active_bytes, batch_size))


def rate_on_gpu(
    sizes: Sizes, memory: GpuMemory, storage: float, bus: float, batch_size: int, compute: Compute
) -> Rate:
    """Return the rate of decoding on a GPU; `storage` and `bus`: bandwidths in bytes per second."""
    copied, read = gpu_streams(sizes, memory)
    return Rate(batch_size, read / storage, compute(sizes.active_bytes, batch_size), copied / bus)
