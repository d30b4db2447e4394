"""A second Checkpointer inside the directory of the first, as docs/checkpoints.md describes it."""

import errno
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support_program import PROGRAM

import trunkline as tl


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(step)), "step": step}


def assert_holds(directory: Path, steps: list[int]) -> None:
    checkpoints = tl.Checkpointer(directory, process_group=False)
    assert checkpoints.steps() == steps
    for step in steps:
        checkpoints.verify(step)
        assert torch.equal(checkpoints.load(step)["weights"], state(step)["weights"])


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """Steps 2 to 4 in run, and 1 and 3 in run/best."""
    run = tmp_path / "run"
    main = tl.Checkpointer(run, keep=3, process_group=False)
    best = tl.Checkpointer(run / "best", keep=2, process_group=False)
    for step in range(5):
        main.save(step, state(step), block=True)
        if step % 2:
            best.save(step, state(step), block=True)
    return run


def test_neither_removes_or_lists_what_the_other_saves(nested: Path) -> None:
    assert_holds(nested, [2, 3, 4])
    assert_holds(nested / "best", [1, 3])
    subprocess.run([str(PROGRAM), "checkpoint", "gc", str(nested), "--orphaned"], check=True)
    tl.Checkpointer(nested, process_group=False).delete(3)
    assert_holds(nested, [2, 4])
    assert_holds(nested / "best", [1, 3])


def test_a_save_that_was_killed_beside_it_leaves_it_alone(nested: Path) -> None:
    (nested / "step-00000009").mkdir()  # what a save that was killed leaves
    (nested / "best" / "step-00000009").mkdir()
    assert_holds(nested, [2, 3, 4])
    assert_holds(nested / "best", [1, 3])


def test_starting_over_leaves_the_inner_one(nested: Path) -> None:
    tl.Checkpointer(nested, fresh=True, process_group=False).save(0, state(0), block=True)
    assert_holds(nested, [0])
    assert_holds(nested / "best", [1, 3])
    (aside,) = nested.glob("aside-*")
    assert_holds(aside, [2, 3, 4])
    again = tl.Checkpointer(nested / "best", fresh=True, process_group=False)
    again.save(0, state(0), block=True)
    assert_holds(nested / "best", [0])


def test_the_outer_one_must_save_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    opened_before = tl.Checkpointer(run, process_group=False)
    tl.Checkpointer(run / "best", process_group=False).save(1, state(1), block=True)
    for save in (
        lambda: opened_before.save(1, state(1), block=True),
        lambda: tl.Checkpointer(run, process_group=False),
    ):
        with pytest.raises(tl.Error, match="best") as caught:
            save()
        assert caught.value.errno == errno.ENOTEMPTY
    assert_holds(run / "best", [1])


def test_starting_over_moves_the_folders_of_steps_as_a_whole(nested: Path) -> None:
    inner = nested / "step-00000004" / "best"
    tl.Checkpointer(inner, process_group=False).save(1, state(1), block=True)
    tl.Checkpointer(nested, fresh=True, process_group=False).save(0, state(0), block=True)
    (aside,) = nested.glob("aside-*")
    assert not inner.exists()
    assert_holds(aside / "step-00000004" / "best", [1])
