"""What tests of tiers share: states, and copies that wait."""

import _thread
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import trunkline as tl
from trunkline.checkpoint.tiers import drain


def state_of(step: int, elements: int = 100_000) -> dict[str, Any]:
    """Return a state that no other step has."""
    return {"weights": torch.full((elements,), float(step)), "step": step, "odd": torch.arange(step % 7 + 1)}


def save_all(checkpoints: tl.Checkpointer, *steps: int) -> None:
    """Save steps, one after the other."""
    for step in steps:
        checkpoints.save(step, state_of(step), block=True)


def steps_in(directory: Path) -> list[int]:
    """Return the steps in a directory, by itself; each must verify and hold what was saved."""
    if not directory.exists():
        return []
    checkpoints = tl.Checkpointer(directory, process_group=False)
    steps = checkpoints.steps()
    for step in steps:
        checkpoints.verify(step)
        found = checkpoints.load(step)
        assert found["step"] == step
        assert torch.equal(found["weights"], state_of(step, found["weights"].numel())["weights"])
    return steps


@contextmanager
def nothing_copied_to(directory: Path) -> Iterator[None]:
    """Let copies to a tier wait, before they look for what is to be copied."""
    turn = drain._turns.setdefault(os.path.realpath(directory), _thread.allocate_lock())
    with turn:
        yield
