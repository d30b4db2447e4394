"""Plans which weights of a streamed model stay in the memory they are used in; the others are streamed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trunkline import _core
from trunkline._core import parse_size
from trunkline._errors import OutOfBudget
from trunkline._streaming.memory import budget_argument, default_budget
from trunkline._streaming.roofline import GPU_SLOTS, PAGE_BYTES, slots_bytes
from trunkline._streaming.stored import FileTensor, StreamUnit
from trunkline._tensor_io.memory import Device, device_argument
from trunkline.transformers._bound_unit import WeightView
from trunkline.transformers.layers import Unit
from trunkline.transformers.stored_model import Checkpoint


@dataclass(frozen=True)
class Memory:
    """The device that computes, and how many bytes weights may take in its memory and in main memory."""

    device: torch.device
    budget: int
    host_bytes: int

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type != "cpu"


def memory_arguments(
    device: Device, memory_budget: int | str | None, host_memory: int | str | None, folder: Path
) -> Memory:
    """Resolve the arguments of from_pretrained."""
    target = device_argument(device, str(folder))
    budget = budget_argument(memory_budget, target)
    if target.type == "cpu":
        if host_memory is not None:
            raise ValueError("host_memory: only for a model on a GPU; on the CPU use memory_budget")
        return Memory(target, budget, budget)
    host = default_budget() if host_memory is None else parse_size(host_memory, "host_memory")
    return Memory(target, budget, host)


@dataclass(frozen=True)
class StoredUnit:
    """A unit, its description for WeightStream, and the offset of each of its weights in memory, in order."""

    unit: Unit
    described: StreamUnit
    offsets: list[tuple[int, FileTensor]]

    @classmethod
    def of(cls, unit: Unit, places: dict[str, FileTensor]) -> "StoredUnit":
        """Lay the unit out so that it is read from the file without a copy."""
        offsets, at = [], 0
        for weight in unit.weights:
            stored = places[weight.path]
            at += (stored.offset - at) % PAGE_BYTES
            offsets.append((at, stored))
            at += stored.nbytes
        parts = [(each.file, each.offset, each.nbytes, begin, each.checksum) for begin, each in offsets]
        name = unit.weights[0].path
        if len(unit.weights) > 1:
            name += f" .. {unit.weights[-1].path}"
        return cls(unit, (name, at, parts), offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of main memory that it needs."""
        return self.described[1]

    def views(self, memory: Memory) -> list[WeightView]:
        """Return the weights' offsets in the memory they are used in, their dtypes and shapes."""
        begins = _core.device_layout(self.described) if memory.on_gpu else [at for at, _ in self.offsets]
        return [
            WeightView(begin, stored.dtype, stored.shape)
            for begin, (_, stored) in zip(begins, self.offsets, strict=True)
        ]


@dataclass
class MemoryPlan:
    """The units that are streamed; on a GPU also the weights that stay, and the size of all slots.

    In main memory the stream itself decides which units stay.
    """

    streamed: list[StoredUnit]
    resident: list[str] = field(default_factory=list)
    gpu_slots_bytes: int | None = None


def plan_placement(memory: Memory, checkpoint: Checkpoint, places: dict[str, FileTensor]) -> MemoryPlan:
    """Plan where the weights are. Raises OutOfBudget, which names the least budget."""
    units = [StoredUnit.of(unit, places) for unit in checkpoint.units]
    return (
        _plan_on_gpu(memory, checkpoint, units) if memory.on_gpu else _plan_on_cpu(memory, checkpoint, units)
    )


def _plan_on_cpu(memory: Memory, checkpoint: Checkpoint, units: Sequence[StoredUnit]) -> MemoryPlan:
    most = [unit.unit.max_bytes for unit in units]
    least = checkpoint.resident_bytes + slots_bytes(most)
    if memory.budget < least:
        raise _too_small(memory, checkpoint, max(most, default=0), least)
    return MemoryPlan(list(units))


def _plan_on_gpu(memory: Memory, checkpoint: Checkpoint, units: Sequence[StoredUnit]) -> MemoryPlan:
    sizes = [_core.device_slot_bytes([unit.described]) for unit in units]
    least = checkpoint.resident_bytes + slots_bytes(sizes)
    if memory.budget < least:
        raise _too_small(memory, checkpoint, max(sizes, default=0), least)
    if not units:
        return MemoryPlan([], gpu_slots_bytes=0)
    placement = _core.place_units(sizes, memory.budget - checkpoint.resident_bytes, GPU_SLOTS)
    plan = MemoryPlan([], gpu_slots_bytes=placement["slots"] * placement["slot_bytes"])
    for unit, stays in zip(units, placement["resident"], strict=True):
        if stays:
            plan.resident += [weight.path for weight in unit.unit.weights]
        else:
            plan.streamed.append(unit)
    least_host = slots_bytes([unit.unit.max_bytes for unit in plan.streamed])
    if memory.host_bytes < least_host:
        raise OutOfBudget(
            None,
            f"host_memory: {memory.host_bytes} bytes cannot hold two of the units that are streamed through "
            f"main memory to the GPU; the least is {least_host} bytes",
            str(checkpoint.folder),
        )
    return plan


def _too_small(memory: Memory, checkpoint: Checkpoint, largest: int, least: int) -> OutOfBudget:
    return OutOfBudget(
        None,
        f"memory_budget: {memory.budget} bytes cannot hold the weights of {checkpoint.folder} that stay in "
        f"memory ({checkpoint.resident_bytes} bytes of embeddings, norms and head) and two units of up to "
        f"{largest} bytes; the least is {least} bytes ({least / 1e9:.3f} GB), or less with a smaller "
        "unit_bytes if units hold several weights",
        str(checkpoint.folder),
    )
