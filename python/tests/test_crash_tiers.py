"""SIGKILL of a process that copies steps to a tier: every copy there is whole, and the rest follows."""

import multiprocessing
import os
import random
import shutil
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support_crash_tiers import EVERY, KEEP, open_run, run_saver
from support_tiers import steps_in

ROUNDS = int(os.environ.get("TRUNKLINE_TEST_TIER_KILLS", "40"))
SEED = 21
_LAZY = [f"trunkline.checkpoint.{name}" for name in ("directory.checkpointer", "load", "save")]
_LONGEST_SECONDS = 0.4  # from the first save to the kill
_PATIENCE_SECONDS = 60.0


def listen(connection: Connection, seconds: float, heard: dict[str, int], until_ready: bool = False) -> None:
    deadline = time.monotonic() + seconds
    try:
        while connection.poll(max(0.0, deadline - time.monotonic())):
            what, value = connection.recv()
            assert what != "failed", value
            heard[what] = value
            if until_ready and what == "ready":
                return
    except EOFError:
        return
    assert not until_ready, "the saving process did not begin"


def one_round(processes: Any, root: Path, rng: random.Random) -> dict[str, int]:
    """Let a process save and copy, and kill it; return the last step of each kind that it has reported."""
    here, there = processes.Pipe(duplex=False)
    saver = processes.Process(target=run_saver, args=(there, root, rng.getrandbits(32)))
    saver.start()
    there.close()
    heard: dict[str, int] = {}
    try:
        listen(here, _PATIENCE_SECONDS, heard, until_ready=True)
        listen(here, rng.uniform(0, _LONGEST_SECONDS), heard)
        saver.kill()
        saver.join()
        listen(here, _PATIENCE_SECONDS, heard)  # to the end of what it sent
    finally:
        saver.kill()
        saver.join()
        here.close()
    return heard


def test_a_kill_while_steps_are_copied(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["support_crash_tiers", *_LAZY])
    counts: Counter[str] = Counter()
    copied, saved = 0, 0
    for _ in range(ROUNDS):
        heard = one_round(processes, tmp_path, rng)
        tier = tmp_path / "tier"
        counts["cut_off"] += any(not list(step.glob("manifest-*")) for step in tier.glob("step-*"))
        in_tier = steps_in(tier)
        assert all(step % EVERY == 0 for step in in_tier)
        assert len(in_tier) <= KEEP + 1  # the oldest goes after the new one is there
        copied = max(copied, heard.get("copied", 0))
        assert max(in_tier, default=0) >= copied, "a copy that was reported is there"
        assert [step.name for step in tier.glob("step-*") if not list(step.glob("manifest-*"))] == []
        saved = max(saved, heard.get("saved", 0))
        latest = open_run(tmp_path).latest()
        assert (latest or 0) in (saved, heard.get("begins", saved))
        if rng.random() < 0.2:  # the disk of the run is lost: it goes on from the last copy
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            saved = max(in_tier, default=0)
            counts["lost"] += 1
        elif latest is not None:
            saved = latest
    assert counts["cut_off"] > 0, "some kills came while a step was copied: else this shows nothing"
    assert counts["lost"] > 0
    checkpoints = open_run(tmp_path)
    checkpoints.wait_drained()
    expected = checkpoints.latest() or 0
    assert steps_in(tmp_path / "tier")[-1:] == [expected // EVERY * EVERY][: expected // EVERY]
