"""How fast a streamed model can be: bounded by bytes over bandwidth, or by computing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trunkline import _core
from trunkline._errors import OutOfBudget

PAGE_BYTES = 4096

# Seconds that a pass computes: (bytes of weights, rows in the batch).
Compute = Callable[[int, int], float]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights: those that always stay in memory, and the units that may be streamed."""

    resident_bytes: int
    unit_bytes: tuple[int, ...]
    unit_weights: tuple[int, ...] = ()  # how many weights each unit holds; (): one each

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.resident_bytes + sum(self.unit_bytes)

    @property
    def least_budget(self) -> int:
        """The smallest memory_budget that is accepted."""
        counts = self.unit_weights or (1,) * len(self.unit_bytes)
        return self.resident_bytes + slots_bytes(
            [max_unit_bytes(nbytes, count) for nbytes, count in zip(self.unit_bytes, counts, strict=True)]
        )


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


def gpu_streams(sizes: Sizes, memory: GpuMemory) -> tuple[int, int]:
    """Return how many bytes each pass copies to the GPU, and how many of them it reads from storage.

    Raises OutOfBudget, naming the least.
    """
    copied = passing_units(sizes, memory.budget, GPU_SLOTS)
    least = slots_bytes(copied)
    if memory.host_bytes < least:
        raise OutOfBudget(
            None,
            f"host_memory: {memory.host_bytes} bytes cannot hold two of the units that are streamed through "
            f"main memory to the GPU; the least is {least} bytes",
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
            f"memory_budget: {memory_budget} bytes cannot hold the weights that stay in memory "
            f"({sizes.resident_bytes} bytes) and two units; the least is {least} bytes "
            f"({least / 1e9:.3f} GB)",
        )
    return _passing(sizes.unit_bytes, memory_budget - sizes.resident_bytes, slots)


def _passing(unit_bytes: Sequence[int], memory_bytes: int, slots: int) -> list[int]:
    if not unit_bytes:
        return []
    placed = _core.place_units(unit_bytes, memory_bytes, slots)
    return [nbytes for nbytes, stays in zip(unit_bytes, placed["resident"], strict=True) if not stays]


def rate(sizes: Sizes, memory_budget: int, bandwidth: float, batch_size: int, compute: Compute) -> Rate:
    """Return the rate of decoding; `bandwidth`: of the storage, in bytes per second."""
    return Rate(
        batch_size,
        streamed_bytes(sizes, memory_budget) / bandwidth,
        compute(sizes.weight_bytes, batch_size),
    )


def rate_on_gpu(
    sizes: Sizes, memory: GpuMemory, storage: float, bus: float, batch_size: int, compute: Compute
) -> Rate:
    """Return the rate of decoding on a GPU; `storage` and `bus`: bandwidths in bytes per second."""
    copied, read = gpu_streams(sizes, memory)
    return Rate(batch_size, read / storage, compute(sizes.weight_bytes, batch_size), copied / bus)
