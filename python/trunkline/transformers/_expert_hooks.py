"""Routed experts are read when their module learns which ones its tokens use."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trunkline._core import File, UnitCache
from trunkline._streaming.roofline import uses_most
from trunkline._streaming.weight_hooks import not_compiled
from trunkline._tensor_io.memory import CPU, empty_bytes
from trunkline.transformers._expert_plan import ExpertPlan
from trunkline.transformers._routed_weights import (
    Dequantised,
    ExpertMemory,
    RoutedMatrices,
    RoutedWeight,
)
from trunkline.transformers.experts import Experts, routing_of, scratch_sizes, uses_of


def route(
    plan: ExpertPlan, files: Sequence[File], remedy: str, used: Mapping[str, Sequence[float]]
) -> UnitCache:
    """Let the modules read their experts from the files; return the cache that they are in.

    `used`: what use_of() returned in an earlier run; {} if there was none.
    """
    rates = [rate for each in plan.experts for _ in each.weights for rate in used.get(each.name, ())]
    cache = UnitCache(
        list(files),
        plan.units,
        memory_bytes=plan.memory_bytes,
        read_ahead=plan.read_ahead,
        use_rates=rates,
    )
    memory = ExpertMemory(cache, remedy, [empty_bytes(size, CPU) for size in scratch_sizes(plan.experts)])
    hooks: list[_ExpertHooks] = []
    first = 0
    for experts in plan.experts:
        last = first + experts.count * len(experts.weights)
        begins = [parts[0][3] for (_, _, parts), _, _ in plan.units[first:last]]
        hooks.append(_ExpertHooks(len(hooks), experts, memory, first, begins))
        first = last
    for each, following in zip(hooks, [*hooks[1:], *hooks[:1]], strict=True):
        each.following = following.units
    return cache


def use_of(plan: Sequence[tuple[str, int, int]], cache: UnitCache) -> dict[str, list[float]]:
    """Return how much each expert of each module has been used; `plan`: of use_plan()."""
    rates = cache.use_rates()
    return {name: rates[first : first + count] for name, first, count in plan}


def use_plan(plan: ExpertPlan) -> list[tuple[str, int, int]]:
    """Return each module's name, the unit of its first expert, and how many experts it has."""
    found, first = [], 0
    for each in plan.experts:
        found.append((each.name, first, each.count))
        first += each.count * len(each.weights)  # all matrices of an expert are used together
    return found


class _ExpertHooks:
    """Hooks on a module with experts. One thread at a time runs the model (WeightHooks)."""

    def __init__(
        self, group: int, experts: Experts, memory: ExpertMemory, first: int, begins: Sequence[int]
    ) -> None:
        """`first`: the number of its first unit. `begins`: where the matrices begin in their units."""
        module = experts.module
        self._group = group
        self._memory = memory
        self._count = experts.count
        self._firsts = [first + index * experts.count for index in range(len(experts.weights))]
        self.units = list(range(first, first + experts.count * len(experts.weights)))
        self.following: list[int] = []  # units of the next module
        for unit, weight, nbytes in zip(self._firsts, experts.weights, experts.matrix_bytes, strict=True):
            parameter = module._parameters[weight.name]
            assert parameter is not None
            of_weight = begins[unit - first : unit - first + experts.count]
            scratch = memory.scratch[(unit - first) // experts.count]
            quantised = None if weight.quantised is None else Dequantised(weight.quantised, scratch, nbytes)
            matrices = RoutedMatrices(memory, group, unit, of_weight, parameter, quantised)
            module._parameters[weight.name] = RoutedWeight.routed(weight.path, parameter, matrices)
        module.forward = _uncompiled_forward(module, memory, group)
        module.register_forward_pre_hook(not_compiled(self.before), with_kwargs=True)
        module.register_forward_hook(not_compiled(self.after), always_call=True)

    def before(self, module: nn.Module, arguments: Any, named: Any) -> None:
        """Read the experts that the module is going to use."""
        self._memory.release_all()  # an interrupt may have ended the pass before without calling hooks
        routing = routing_of(arguments, named)
        if routing is None or routing.dim() == 0:
            return
        used = uses_of(routing, self._count)
        uses = [(first + expert, tokens) for first in self._firsts for expert, tokens in used]
        expected = self.following if uses_most(len(used), self._count) else []
        self._memory.cache.request(self._group, uses, routing.shape[0], expected)

    def after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Let their memory be reused."""
        self._memory.release_all()


def _uncompiled_forward(module: nn.Module, memory: ExpertMemory, group: int) -> Any:
    """Return the module's forward, which torch.compile leaves alone: it reads weights from files.

    Only within it are the weights of the group usable.
    """
    kept, forward = weakref.ref(module), type(module).forward

    def run(*arguments: Any, **named: Any) -> Any:
        before = memory.running
        try:
            memory.running = group
            return forward(kept(), *arguments, **named)
        finally:
            memory.running = before

    return not_compiled(run)
