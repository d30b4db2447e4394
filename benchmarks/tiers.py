"""Copies of checkpoints to a tier, on another disk, with a limit on its bytes per second.

How near the limit a copy comes: every byte is written there, and read back to be verified. How much longer a
save takes while a copy runs, beside the same save without. What the tier has is loaded and compared.
"""

from __future__ import annotations

import shutil
import time

import model_state
from measurement import Comparison, interleave
from workbench import Workbench

import trunkline as tl

LIMIT = 200_000_000  # bytes per second of a copy
SHARE = 4  # of the state: one in so many bytes
EVERY = 2  # steps that are copied


def measure(bench: Workbench) -> list[Comparison]:
    if len(bench.disks.directories) < 2:
        return []
    bench.free_transfer_memory()
    state = model_state.make(bench.bytes // SHARE)
    moved = 2 * model_state.total_bytes(state) / 1e9
    run, tier = bench.first / "run", bench.disks.directories[1] / "tier"
    tiers = [tl.Tier(tier, every=EVERY, keep=1, bytes_per_second=LIMIT)]
    step = 0

    def save(made: tl.Checkpointer, *, copied: bool) -> float:
        """Save a step, one that is copied or one that is not; return the seconds."""
        nonlocal step
        step += EVERY if copied == (step % EVERY == 0) else 1
        bench.disks.rest()
        began = time.perf_counter()
        made.save(step, state, block=True)
        return time.perf_counter() - began

    def copy() -> float:
        """Copy what a run has saved without the tier; return GB/s."""
        made = tl.Checkpointer(run, keep=1)
        if made.latest() is not None:
            made.load()
        save(made, copied=True)
        made = tl.Checkpointer(run, keep=1, tiers=tiers)
        bench.disks.rest()
        began = time.perf_counter()
        made.wait_drained()
        return moved / (time.perf_counter() - began)

    copy()
    checkpoints = tl.Checkpointer(run, keep=1, tiers=tiers)
    checkpoints.load()

    def beside() -> float:
        save(checkpoints, copied=True)  # its copy runs from now on
        seconds = save(checkpoints, copied=False)
        if checkpoints.drains()[0].step is None:
            raise SystemExit("bench: the copy ended before the save beside it")
        checkpoints.wait_drained()
        return seconds

    got = interleave(
        bench.rounds,
        {"beside a copy": beside, "alone": lambda: save(checkpoints, copied=False)},
        "tiers, saves",
    )
    got |= interleave(bench.rounds, {"copy": copy}, "tiers, copies")
    if not model_state.same(tl.Checkpointer(tier).load(), state):
        raise SystemExit("bench: what was copied differs from the state")
    for each in (run, tier):
        shutil.rmtree(each)
    limit = [LIMIT / 1e9] * bench.rounds
    return [
        Comparison(
            *("tiers", f"a copy, limited to {LIMIT / 1e9:g} GB/s", "GB/s", "the limit", got["copy"], limit),
            at_least=0.98,
        ),
        Comparison(
            *("tiers: saves meanwhile", "a save while a copy runs", "s", "the same, no copy"),
            *(got["beside a copy"], got["alone"]),
            at_most=1.05,
        ),
    ]
