"""A directory of many steps: a save does not read the manifests of the others."""

import os
import warnings
from pathlib import Path

import torch

import trunkline as tl

STEPS = 100
STATE = {"x": torch.ones(3)}


def test_a_save_that_keeps_all_reads_no_other_manifest(tmp_path: Path) -> None:
    """Opening looks into each, for what a crash left behind; saving would become slower with each step."""
    run = tmp_path / "run"
    checkpoints = tl.Checkpointer(run, keep=None)
    for step in range(STEPS):
        checkpoints.save(step, STATE, block=True)
    for manifest in run.glob("step-*/manifest-*"):
        manifest.write_bytes(b"damaged")  # who reads one says so
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints.latest() == STEPS - 1
        assert checkpoints.steps() == list(range(STEPS))
        checkpoints.save(STEPS, STATE, block=True)
        checkpoints.save(STEPS, {"x": torch.zeros(3)}, block=True)  # replaces the one before
        assert torch.equal(checkpoints.load()["x"], torch.zeros(3))
    assert len(list(run.glob(f"step-{STEPS:08d}/manifest-*"))) == 1


def test_clocks_decide_nothing(tmp_path: Path) -> None:
    """Clocks jump, and machines differ: what was committed last counts, whatever the times of files are."""
    run = tmp_path / "run"
    checkpoints = tl.Checkpointer(run, keep=2)
    for step, seconds in ((1, 1 << 33), (2, 0), (3, 1 << 31)):
        checkpoints.save(step, {"step": step}, block=True)
        for path in (*run.glob(f"step-{step:08d}/*"), run / f"step-{step:08d}"):
            os.utime(path, (seconds, seconds))
    assert checkpoints.steps() == [2, 3]
    assert tl.Checkpointer(run).latest() == 3
    assert tl.Checkpointer(run).load() == {"step": 3}
