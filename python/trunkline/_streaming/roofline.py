"""How fast a model whose weights are streamed can be: bytes by bandwidth, or computing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trunkline import _core
from trunkline._errors import OutOfBudget

PAGE_BYTES = 4096

# Seconds of computing a pass over so many bytes of weights takes for a batch of so many rows.
Compute = Callable[[int, int], float]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights: what stays in any case, and the units that may be streamed."""

    resident_bytes: int
    unit_bytes: tuple[int, ...]
    unit_weights: tuple[int, ...] = ()  # how many weights each unit holds; (): one each

    @property
    def weight_bytes(self) -> int:
        """All of them."""
        return self.resident_bytes + sum(self.unit_bytes)

    @property
    def least_budget(self) -> int:
        """The smallest memory_budget that is accepted."""
        counts = self.unit_weights or (1,) * len(self.unit_bytes)
        return self.resident_bytes + slots_bytes(
            [most_unit_bytes(nbytes, count) for nbytes, count in zip(self.unit_bytes, counts, strict=True)]
        )


@dataclass(frozen=True)
class Rate:
    """What one step (a token for each row of the batch) takes, in seconds, and what bounds it."""

    batch_size: int
    storage_seconds: float
    compute_seconds: float
    bus_seconds: float = 0.0  # copying weights from main memory to a GPU

    @property
    def seconds(self) -> float:
        """Of the step: reading, copying and computing overlap."""
        return max(self.storage_seconds, self.bus_seconds, self.compute_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.batch_size / self.seconds if self.seconds else float("inf")

    @property
    def bound(self) -> str:
        """What takes longest: "storage", "bus" or "compute"."""
        if self.storage_seconds >= max(self.bus_seconds, self.compute_seconds):
            return "storage"
        return "bus" if self.bus_seconds >= self.compute_seconds else "compute"


def most_unit_bytes(nbytes: int, weights: int) -> int:
    """Return the most memory that a unit of this many bytes in so many weights takes.

    In memory each weight is as far into a page as it is in its file. So a unit can need up to a page more for
    each weight, depending on which pack there is and for which unit_bytes it was made. The least budget must
    be one number that holds for all of them: an error names it before it is known which pack will be read.
    """
    return nbytes + weights * PAGE_BYTES


def paged_bytes(unit_bytes: Sequence[int]) -> int:
    """Return how much memory all of the units need."""
    return sum(_whole_pages(nbytes) for nbytes in unit_bytes)


def slots_bytes(unit_bytes: Sequence[int]) -> int:
    """Return how much memory units need that are laid out: two slots of the largest one, or all of them."""
    return min(paged_bytes(unit_bytes), 2 * _whole_pages(max(unit_bytes, default=0)))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def streamed_bytes(sizes: Sizes, memory_budget: int) -> int:
    """Return how many bytes each pass reads with that budget. Raises OutOfBudget, naming the least."""
    return sum(passing_units(sizes, memory_budget))


# On a GPU one is computed with, one is being filled, one waits to be.
GPU_SLOTS = 3


@dataclass(frozen=True)
class GpuMemory:
    """What a GPU and main memory may hold of a model that computes on the GPU, in bytes."""

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
            f"host_memory: {memory.host_bytes} bytes cannot hold two units of what passes through main "
            f"memory to the GPU; the least is {least} bytes",
        )
    return sum(copied), sum(_passing(copied, memory.host_bytes, 2))


def passing_units(sizes: Sizes, memory_budget: int, slots: int = 2) -> list[int]:
    """Return the sizes of the units that pass through memory with that budget, of which the others stay.

    Raises OutOfBudget, naming the least.
    """
    least = sizes.least_budget
    if memory_budget < least:
        raise OutOfBudget(
            None,
            f"memory_budget: {memory_budget} bytes cannot hold what stays in memory ({sizes.resident_bytes} "
            f"bytes) and two units; the least is {least} bytes ({least / 1e9:.3f} GB)",
        )
    return _passing(sizes.unit_bytes, memory_budget - sizes.resident_bytes, slots)


def _passing(unit_bytes: Sequence[int], memory_bytes: int, slots: int) -> list[int]:
    if not unit_bytes:
        return []
    placed = _core.place_units(unit_bytes, memory_bytes, slots)
    return [nbytes for nbytes, stays in zip(unit_bytes, placed["resident"], strict=True) if not stays]


def rate(sizes: Sizes, memory_budget: int, bandwidth: float, batch_size: int, compute: Compute) -> Rate:
    """Return the rate of decoding; `bandwidth` of the storage in bytes a second."""
    return Rate(
        batch_size,
        streamed_bytes(sizes, memory_budget) / bandwidth,
        compute(sizes.weight_bytes, batch_size),
    )


def rate_on_gpu(
    sizes: Sizes, memory: GpuMemory, storage: float, bus: float, batch_size: int, compute: Compute
) -> Rate:
    """Return the rate of decoding on a GPU; bandwidths of storage and bus in bytes a second."""
    copied, read = gpu_streams(sizes, memory)
    return Rate(batch_size, read / storage, compute(sizes.weight_bytes, batch_size), copied / bus)
