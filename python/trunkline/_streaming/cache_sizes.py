"""Replays a trace of routing over sizes of memory for experts: hit rates, and bytes that steps read."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trunkline import _core
from trunkline._streaming.roofline import ExpertSizes, units_ahead, uses_most
from trunkline._streaming.routing_trace import RoutingTrace, Step

_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)  # of the experts
_MUCH = 2**62  # more than there is
_NAMED = 8  # numbers of tokens, in an error


@dataclass(frozen=True)
class Replayed:
    """What steps with a cache of `cached_bytes` would do.

    `hit_rate`: of all steps, beginning with an empty cache; `lru`, `lfu`, `static`: that of other policies.
    `read_bytes`, `used_bytes`: on average, of a pass whose steps have the wanted number of tokens.
    """

    cached_bytes: int
    hit_rate: float
    read_bytes: float
    used_bytes: float
    lru: float
    lfu: float
    static: float


class CacheSizes:
    """A trace, and the sizes of the experts of its model. Thread-safe."""

    def __init__(self, trace: RoutingTrace, experts: Sequence[ExpertSizes], tokens: int) -> None:
        """`tokens`: of the steps whose bytes count. Raises ValueError unless the trace has such steps."""
        counts = tuple(count for _, count in trace.modules)
        if counts != tuple(each.count for each in experts):
            raise ValueError(
                f"{trace.path} is a trace of {trace.model}, with {_modules_text(counts)}, not of this model, "
                f"with {_modules_text([each.count for each in experts])}"
            )
        self._trace = trace
        self._experts = experts
        self._tokens = tokens
        found = sorted({step.tokens for step in trace.steps})
        if tokens not in found:
            known = ", ".join(map(str, found[:_NAMED]))
            raise ValueError(f"{trace.path} has no steps of {tokens} tokens; it has {known or 'no steps'}")
        self._per_token = max(each.per_token for each in experts)
        counted = [step for step in trace.steps if step.tokens == tokens]
        self._used = sum(len(step.uses) for step in counted)
        self._used_bytes = sum(len(step.uses) * experts[step.module].expert_bytes for step in counted)
        pools: dict[int, int] = {}
        modules = [
            (each.count, [pools.setdefault(nbytes, len(pools)) for nbytes in each.matrix_bytes])
            for each in experts
        ]
        self._pool_bytes = list(pools)
        self._replay = _core.CacheReplay(
            modules, [_described(step, counts[step.module]) for step in trace.steps]
        )
        self._sizes: list[int] = []
        self._pools: list[int] = []
        for each, (_, of_module) in zip(experts, modules, strict=True):
            for nbytes, pool in zip(each.matrix_bytes, of_module, strict=True):
                self._sizes += [nbytes] * each.count
                self._pools += [pool] * each.count
        self._known: dict[tuple[int, ...], Replayed] = {}

    @property
    def document(self) -> dict[str, Any]:
        """What there is to say about the trace itself.

        "first_uses" is the share of uses that are the first of an expert: misses of any cache that is empty
        at first.
        """
        return {
            "file": self._trace.path,
            "model": self._trace.model,
            "steps": len(self._trace.steps),
            "steps_of_batch": sum(step.tokens == self._tokens for step in self._trace.steps),
            "first_uses": self._replay.used_units / max(1, self._replay.uses),
        }

    def at(self, memory_bytes: int) -> Replayed:
        """Replay the trace with so much memory for experts. Raises OutOfBudget below the least."""
        placement = _core.place_pools(self._sizes, self._pools, memory_bytes)
        slots = placement["slots"]
        key = tuple(slots)
        if key not in self._known:
            self._known[key] = self._replayed(slots, placement["memory_bytes"])
        return self._known[key]

    def over_sizes(self, least: int, *more: int) -> list[Replayed]:
        """Replay the trace over shares of the experts, from `least` bytes on, and with `more` bytes."""
        everything = _core.place_pools(self._sizes, self._pools, _MUCH)["memory_bytes"]
        shares = {int(share * everything) for share in _SHARES}
        wanted = {each for each in shares if each >= least} | {everything, *more}
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = set(threads.map(self.at, wanted))
        return sorted(found, key=lambda each: each.cached_bytes)

    def _replayed(self, slots: Sequence[int], cached_bytes: int) -> Replayed:
        replay, uses = self._replay, max(1, self._replay.uses)
        ahead = units_ahead(self._per_token, max(self._sizes), min(slots))
        every, counted = replay.replay(slots, ahead, self._tokens)
        passes = counted["steps"] / len(self._experts)
        for_misses = min(ahead, round(self._used / counted["steps"]))
        read = sum(
            units * nbytes for units, nbytes in zip(counted["units_read"], self._pool_bytes, strict=True)
        )
        return Replayed(
            cached_bytes,
            every["hits"] / uses,
            read / passes,
            self._used_bytes / passes,
            lru=replay.lru_hits(slots) / uses,
            lfu=replay.lfu_hits(slots) / uses,
            static=replay.static_hits(slots, for_misses) / uses,
        )


def _described(step: Step, count: int) -> tuple[int, int, list[int], list[int], bool]:
    """Return a step as CacheReplay takes it; `count`: of the module's experts."""
    experts, tokens = [expert for expert, _ in step.uses], [used for _, used in step.uses]
    return step.module, step.tokens, experts, tokens, uses_most(len(experts), count)


def _modules_text(counts: Sequence[int]) -> str:
    experts = " or ".join(map(str, sorted(set(counts))))
    return f"{len(counts)} layers of {experts} experts"
