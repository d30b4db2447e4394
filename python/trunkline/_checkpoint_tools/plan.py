"""How often to save checkpoints on machines that fail, what that costs and how much it stores: computed."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from trunkline._checkpoint_interval import daly_interval, lost_share, lost_work, young_interval
from trunkline._numbers import check_count, check_not_negative, check_positive

NODE_MTBF_HOURS = 6340.0
"""Mean time between failures of a node of 8 accelerators, from "The Llama 3 Herd of Models" (2024): 419
unexpected interruptions in 54 days on 16,384 accelerators are one in 50,700 hours of an accelerator."""


@dataclass(frozen=True)
class Tier:
    """A directory of another storage to which some of the checkpoints are copied."""

    bytes_per_second: float
    keep: int = 3
    """Checkpoints that are kept there."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of its range."""
        check_positive("Tier.bytes_per_second", self.bytes_per_second)
        check_count("Tier.keep", self.keep)


@dataclass(frozen=True)
class SavePlan:
    """What is known of the saves of a training, and of what it runs on."""

    save_seconds: float
    """From the beginning of a save until its checkpoint is durable."""
    stall_seconds: float | None = None
    """How much of that the training stops for; None: all of it. The rest goes on in the background."""
    nbytes: float | None = None
    """Size of a checkpoint."""
    nodes: int = 1
    node_mtbf_hours: float = NODE_MTBF_HOURS
    restart_seconds: float = 300.0
    """From a failure until computation goes on, with loading."""
    keep: int = 3
    """Checkpoints that are kept."""
    step_seconds: float | None = None
    """Time of one step of the training."""
    tier: Tier | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of its range."""
        check_positive("SavePlan.save_seconds", self.save_seconds)
        if self.stall_seconds is not None:
            check_positive("SavePlan.stall_seconds", self.stall_seconds)
            if self.stall_seconds > self.save_seconds:
                raise ValueError(
                    "SavePlan.stall_seconds: must be at most the time of a save, "
                    f"{self.save_seconds:g} s, not {self.stall_seconds:g}"
                )
        if self.nbytes is not None:
            check_positive("SavePlan.nbytes", self.nbytes)
        check_count("SavePlan.nodes", self.nodes)
        check_positive("SavePlan.node_mtbf_hours", self.node_mtbf_hours)
        check_not_negative("SavePlan.restart_seconds", self.restart_seconds)
        check_count("SavePlan.keep", self.keep)
        if self.step_seconds is not None:
            check_positive("SavePlan.step_seconds", self.step_seconds)
        if self.tier is not None and self.nbytes is None:
            raise ValueError("SavePlan.nbytes: needed for a tier")

    @property
    def mtbf(self) -> float:
        """Seconds between two failures of any of the nodes."""
        return self.node_mtbf_hours * 3600 / self.nodes

    @property
    def stall(self) -> float:
        """Seconds for which the training stops at each save."""
        return self.save_seconds if self.stall_seconds is None else self.stall_seconds

    @property
    def in_background(self) -> float:
        """Seconds of a save during which the training goes on."""
        return self.save_seconds - self.stall

    def best_interval(self) -> float:
        """Return how long to compute between two saves to lose the least: at least until one is durable."""
        return max(daly_interval(self.stall, self.mtbf), self.in_background)


def plan_saves(given: SavePlan, cycle_now: float | None = None) -> dict[str, Any]:
    """Compute when to save, and what that costs: fields of `trunkline checkpoint plan --json`.

    cycle_now: seconds from one save to the next as the training saves now, to compare it with others.

    A failure during the part of a save that runs in the background also undoes what was computed since that
    save began, which counts as a longer restart; see _checkpoint_interval for the model.
    """
    best = given.best_interval()
    intervals = {"best": best, "half": best / 2, "double": best * 2}
    young = max(young_interval(given.stall, given.mtbf), given.in_background)
    if young != best:
        intervals["young"] = young
    if cycle_now is not None and cycle_now > given.stall:
        intervals["now"] = cycle_now - given.stall
    rows = [
        {"name": name, **_row(given, intervals[name])}
        for name in sorted(intervals, key=intervals.__getitem__)
        if name == "now" or intervals[name] >= given.in_background
    ]
    document = {**asdict(given), "stall_seconds": given.stall, "bytes": given.nbytes}
    del document["nbytes"]
    return {
        **document,
        "mtbf_seconds": given.mtbf,
        **_row(given, best),
        "intervals": rows,
        "capacity_bytes": _capacity(given),
        "tier": None if given.tier is None else {**asdict(given.tier), **_tier(given, given.tier, best)},
    }


def _row(given: SavePlan, interval: float) -> dict[str, Any]:
    """Return what it costs to save after computing for `interval` seconds each."""
    steps = None if given.step_seconds is None else max(1, round(interval / given.step_seconds))
    restart = given.restart_seconds + given.in_background
    return {
        "interval_seconds": interval,
        "interval_steps": steps,
        "saving_share": given.stall / (interval + given.stall),
        "lost_work_seconds": lost_work(interval, given.stall, given.mtbf) + given.in_background,
        "lost_share": lost_share(interval, given.stall, given.mtbf, restart),
    }


def _capacity(given: SavePlan) -> float | None:
    """Return what the directory must hold: one more than is kept, and one that waits to be copied."""
    return None if given.nbytes is None else given.nbytes * (given.keep + 1 + (given.tier is not None))


def _tier(given: SavePlan, tier: Tier, interval: float) -> dict[str, Any]:
    """Return which checkpoints to copy: as many as a copy, which moves every byte twice, leaves time for."""
    assert given.nbytes is not None
    copy = 2 * given.nbytes / tier.bytes_per_second
    cycle = interval + given.stall
    every = math.ceil(copy / cycle)
    later = (every - 1) * cycle / 2 + copy + given.in_background  # than the last save of the directory
    steps = _row(given, interval)["interval_steps"]
    return {
        "copy_seconds": copy,
        "every": every,
        "every_seconds": every * cycle,
        "every_steps": None if steps is None else steps * every,
        "capacity_bytes": given.nbytes * (tier.keep + 1),
        "lost_work_seconds": lost_work(interval, given.stall, given.mtbf) + later,
        "lost_share": lost_share(interval, given.stall, given.mtbf, given.restart_seconds + later),
    }
