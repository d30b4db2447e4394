"""Plans which weights of a streamed model stay in the memory they are used in; the others are streamed."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from trunkline import _core
from trunkline._core import parse_size
from trunkline._errors import OutOfBudget
from trunkline._streaming.memory import budget_argument, default_budget
from trunkline._streaming.roofline import GPU_SLOTS, given_bytes, least_text, paged_bytes, slots_bytes
from trunkline._streaming.stored import FileTensor
from trunkline._streaming.stored_unit import StoredUnit
from trunkline._tensor_io.memory import Device, device_argument
from trunkline.transformers._expert_plan import ExpertPlan, plan_experts
from trunkline.transformers._kept_quantised import check_on_cpu
from trunkline.transformers.stored_model import Division, StoredModel

_KINDS = "embeddings, norms and head"  # that always stay in memory


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


@dataclass
class MemoryPlan:
    """The units that are streamed, the weights that stay, and the main memory for units.

    In main memory the stream itself decides which units stay. `experts`: those that are read as tokens are
    routed to them. `gpu_slots_bytes`: on a GPU, the size of all slots.
    """

    streamed: list[StoredUnit]
    resident: list[str]
    host_bytes: int
    gpu_slots_bytes: int | None = None
    experts: ExpertPlan | None = None
    scratch_bytes: int = 0  # for dequantised weights


def plan_placement(memory: Memory, stored_model: StoredModel, places: dict[str, FileTensor]) -> MemoryPlan:
    """Plan where the weights are.

    Raises OutOfBudget, which names the least budget, and Unsupported for quantised weights on a GPU.
    """
    check_on_cpu(memory.device, bool(stored_model.quantised), str(stored_model.folder))
    return (_plan_on_gpu if memory.on_gpu else _plan_on_cpu)(memory, stored_model, places)


def _plan_on_cpu(memory: Memory, stored_model: StoredModel, places: dict[str, FileTensor]) -> MemoryPlan:
    whole, routed = stored_model.whole, stored_model.routed
    units = [StoredUnit.of(unit, places) for unit in whole.units]
    room = memory.budget - whole.resident_bytes
    config = stored_model.model.config
    least = sys.maxsize if stored_model.must_route else whole.sizes(config).least_budget
    least_routed = sys.maxsize if routed is None else routed.sizes(config).least_budget
    fits = paged_bytes([unit.nbytes for unit in units]) <= room
    if memory.budget >= least and (fits or memory.budget < least_routed):
        return MemoryPlan(units, whole.resident, room, scratch_bytes=whole.scratch_bytes)
    if routed is not None and memory.budget >= least_routed:
        return _plan_routed(memory, routed, stored_model, places)
    if routed is not None and least_routed < least:
        raise _too_small(memory, stored_model, routed, least_routed)
    raise _too_small(memory, stored_model, whole, least)


def _plan_routed(
    memory: Memory, routed: Division, stored_model: StoredModel, places: dict[str, FileTensor]
) -> MemoryPlan:
    units = [StoredUnit.of(unit, places) for unit in routed.units]
    budget = memory.budget - routed.resident_bytes
    plan = plan_experts(routed, stored_model.model.config, places, [unit.nbytes for unit in units], budget)
    return MemoryPlan(
        units,
        routed.resident,
        budget - plan.memory_bytes,
        experts=plan,
        scratch_bytes=routed.scratch_bytes,
    )


def _plan_on_gpu(memory: Memory, stored_model: StoredModel, places: dict[str, FileTensor]) -> MemoryPlan:
    whole = stored_model.whole
    units = [StoredUnit.of(unit, places) for unit in whole.units]
    sizes = [_core.device_slot_bytes([unit.described]) for unit in units]
    least = whole.resident_bytes + slots_bytes(sizes)
    if memory.budget < least:
        raise _too_small(memory, stored_model, whole, least)
    if not units:
        return MemoryPlan([], whole.resident, memory.host_bytes, 0)
    placement = _core.place_units(sizes, memory.budget - whole.resident_bytes, GPU_SLOTS)
    slots = placement["slots"] * placement["slot_bytes"]
    plan = MemoryPlan([], list(whole.resident), memory.host_bytes, slots)
    for unit, stays in zip(units, placement["resident"], strict=True):
        if stays:
            plan.resident += [weight.path for weight in unit.unit.weights]
        else:
            plan.streamed.append(unit)
    least_host = slots_bytes([unit.unit.max_bytes for unit in plan.streamed])
    if memory.host_bytes < least_host:
        raise OutOfBudget(
            None,
            f"host_memory: {given_bytes(memory.host_bytes)} cannot hold two of the units that are streamed "
            f"through main memory to the GPU; {least_text('host_memory', least_host)}",
            str(stored_model.folder),
        )
    return plan


def _too_small(memory: Memory, stored_model: StoredModel, division: Division, least: int) -> OutOfBudget:
    largest = max((unit.max_bytes for unit in division.units), default=0)
    experts = " and two experts" if division.experts else ""
    kinds = "embeddings, norms, head and memory to dequantise" if division.scratch_bytes else _KINDS
    return OutOfBudget(
        None,
        f"memory_budget: {given_bytes(memory.budget)} cannot hold the weights of {stored_model.folder} that "
        f"stay in memory ({division.resident_bytes} bytes of {kinds}) and two units of "
        f"up to {largest} bytes{experts}; {least_text('memory_budget', least)}, or less with a "
        "smaller unit_bytes if units hold several weights",
        str(stored_model.folder),
    )
