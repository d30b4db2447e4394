"""Where the weights of a streamed model are: what stays, and what passes through the memory it is used in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trunkline import _core
from trunkline._core import parse_size
from trunkline._errors import OutOfBudget
from trunkline._streaming.memory import budget_argument, default_budget
from trunkline._streaming.roofline import GPU_SLOTS, PAGE_BYTES, slots_bytes
from trunkline._streaming.stored import Stored, StreamUnit
from trunkline._tensor_io.memory import Device, device_argument
from trunkline.transformers._bound_unit import WeightView
from trunkline.transformers.layers import Unit
from trunkline.transformers.stored_model import Checkpoint


@dataclass(frozen=True)
class Memory:
    """Where weights are computed with, and how many bytes they may take there and in main memory."""

    device: torch.device
    budget: int
    host_bytes: int

    @property
    def on_gpu(self) -> bool:
        """Whether that is not main memory."""
        return self.device.type != "cpu"


def memory_arguments(
    device: Device, memory_budget: int | str | None, host_memory: int | str | None, folder: Path
) -> Memory:
    """Return what the arguments of from_pretrained mean."""
    target = device_argument(device, str(folder))
    budget = budget_argument(memory_budget, target)
    if target.type == "cpu":
        if host_memory is not None:
            raise ValueError("host_memory: is for a model on a GPU; on the CPU there is memory_budget alone")
        return Memory(target, budget, budget)
    host = default_budget() if host_memory is None else parse_size(host_memory, "host_memory")
    return Memory(target, budget, host)


@dataclass(frozen=True)
class StoredUnit:
    """A unit, as WeightStream takes it, and where in its memory each of its weights begins, in order."""

    unit: Unit
    described: StreamUnit
    placed: list[tuple[int, Stored]]

    @classmethod
    def of(cls, unit: Unit, places: dict[str, Stored]) -> "StoredUnit":
        """Lay the unit out so that nothing of it is copied on its way from the file."""
        placed, at = [], 0
        for weight in unit.weights:
            stored = places[weight.path]
            at += (stored.offset - at) % PAGE_BYTES
            placed.append((at, stored))
            at += stored.nbytes
        parts = [(each.file, each.offset, each.nbytes, begin, each.checksum) for begin, each in placed]
        name = unit.weights[0].path
        if len(unit.weights) > 1:
            name += f" .. {unit.weights[-1].path}"
        return cls(unit, (name, at, parts), placed)

    @property
    def nbytes(self) -> int:
        """How much main memory it takes."""
        return self.described[1]

    def views(self, memory: Memory) -> list[WeightView]:
        """Where each weight begins in the memory that it is used in, its dtype and shape."""
        begins = _core.device_layout(self.described) if memory.on_gpu else [at for at, _ in self.placed]
        return [
            WeightView(begin, stored.dtype, stored.shape)
            for begin, (_, stored) in zip(begins, self.placed, strict=True)
        ]


@dataclass
class Shares:
    """What passes through memory; on a GPU also which weights stay, and how large the slots are together.

    In main memory the stream itself keeps what has room.
    """

    passing: list[StoredUnit]
    staying: list[str] = field(default_factory=list)
    gpu_slots_bytes: int | None = None


def plan_placement(memory: Memory, checkpoint: Checkpoint, places: dict[str, Stored]) -> Shares:
    """Decide it. Raises OutOfBudget, which names the least that would do."""
    units = [StoredUnit.of(unit, places) for unit in checkpoint.units]
    return _share_with_gpu(memory, checkpoint, units) if memory.on_gpu else _share(memory, checkpoint, units)


def _share(memory: Memory, checkpoint: Checkpoint, units: Sequence[StoredUnit]) -> Shares:
    most = [unit.unit.most_bytes for unit in units]
    least = checkpoint.resident_bytes + slots_bytes(most)
    if memory.budget < least:
        raise _too_small(memory, checkpoint, max(most, default=0), least)
    return Shares(list(units))


def _share_with_gpu(memory: Memory, checkpoint: Checkpoint, units: Sequence[StoredUnit]) -> Shares:
    sizes = [_core.device_slot_bytes([unit.described]) for unit in units]
    least = checkpoint.resident_bytes + slots_bytes(sizes)
    if memory.budget < least:
        raise _too_small(memory, checkpoint, max(sizes, default=0), least)
    if not units:
        return Shares([], gpu_slots_bytes=0)
    placement = _core.place_units(sizes, memory.budget - checkpoint.resident_bytes, GPU_SLOTS)
    shares = Shares([], gpu_slots_bytes=placement["slots"] * placement["slot_bytes"])
    for unit, stays in zip(units, placement["resident"], strict=True):
        if stays:
            shares.staying += [weight.path for weight in unit.unit.weights]
        else:
            shares.passing.append(unit)
    least_host = slots_bytes([unit.unit.most_bytes for unit in shares.passing])
    if memory.host_bytes < least_host:
        raise OutOfBudget(
            None,
            f"host_memory: {memory.host_bytes} bytes cannot hold two units of what passes through main "
            f"memory to the GPU; the least is {least_host} bytes",
            str(checkpoint.folder),
        )
    return shares


def _too_small(memory: Memory, checkpoint: Checkpoint, largest: int, least: int) -> OutOfBudget:
    return OutOfBudget(
        None,
        f"memory_budget: {memory.budget} bytes cannot hold what stays in memory of {checkpoint.folder} "
        f"({checkpoint.resident_bytes} bytes of embeddings, norms and head) and two units of up to "
        f"{largest}; the least is {least} bytes ({least / 1e9:.3f} GB), or less with a smaller unit_bytes "
        "where units hold several weights",
        str(checkpoint.folder),
    )
