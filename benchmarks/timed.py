"""Ways to move a model's state, each timed for speed and for processor time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import model_state
from measurement import spent
from workbench import Workbench, rates


def _nothing(*_: object) -> None:
    pass


class Timed:
    """Makes measurements whose result is the speed in GB/s; the processor time of each stays here."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._bytes = model_state.total_bytes(bench.state)
        self._cpu: dict[str, list[float]] = {}

    def __call__(
        self,
        name: str,
        way: Callable[[], Any],
        *,
        before: Callable[[], None] = _nothing,
        after: Callable[[Any], object] = _nothing,
    ) -> Callable[[], float]:
        """One that runs `way`; outside of the time, `before`, and `after` with what `way` returned."""

        def run() -> float:
            before()
            self._bench.disks.rest()
            with spent() as time:
                result = way()
            gb_s, cpu = rates(self._bytes, time.seconds, time.cpu_seconds)
            self._cpu.setdefault(name, []).append(cpu)
            after(result)
            return gb_s

        return run

    def cpu_of(self, name: str) -> list[float]:
        """Seconds per GB, by round."""
        return self._cpu[name][1:]  # the first was the warming up
