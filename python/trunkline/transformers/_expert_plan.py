"""Plans how much memory the routed experts of a model get, and describes them for UnitCache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trunkline import _core
from trunkline._streaming.roofline import split_memory, units_ahead
from trunkline._streaming.stored import FileTensor, StreamUnit
from trunkline.transformers.experts import Experts
from trunkline.transformers.stored_model import Division

# A unit of UnitCache, the group of units among which a token chooses, and the pool of units that share slots.
CacheUnit: TypeAlias = tuple[StreamUnit, int, int]


@dataclass(frozen=True)
class ExpertPlan:
    """The matrices of all experts, module after module, weight after weight and expert after expert."""

    experts: Sequence[Experts]
    units: list[CacheUnit]
    memory_bytes: int
    read_ahead: int  # units of each pool


def plan_experts(
    division: Division,
    config: object,
    places: Mapping[str, FileTensor],
    dense_bytes: Sequence[int],
    budget: int,
) -> ExpertPlan:
    """Plan the experts' share of `budget`; `dense_bytes`: memory that each of the other units needs."""
    pools: dict[int, int] = {}
    units = [
        (_described(places[weight.path].slice(index)), group, pools.setdefault(nbytes, len(pools)))
        for group, experts in enumerate(division.experts)
        for weight, nbytes in zip(experts.weights, experts.matrix_bytes, strict=True)
        for index in range(experts.count)
    ]
    known = division.sizes(config)
    per_token = max(each.per_token for each in known.experts)
    memory_bytes = split_memory(budget, dense_bytes, known.least_cache_bytes, known.cache_bytes_of_a_step)
    sizes = [unit[1] for unit, _, _ in units]
    slots = _core.place_pools(sizes, [pool for _, _, pool in units], memory_bytes)["slots"]
    ahead = units_ahead(per_token, max(sizes), min(slots))
    return ExpertPlan(division.experts, units, memory_bytes, ahead)


def _described(stored: FileTensor) -> StreamUnit:
    """Describe one matrix, which is read without a copy where that is possible."""
    at = stored.next_begin(0)
    return stored.name, at + stored.nbytes, [(stored.file, stored.offset, stored.nbytes, at, stored.checksum)]
