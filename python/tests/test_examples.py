"""The examples of training with tl.data run, learn, and continue with the very same batches."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import support_warm

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOSS = re.compile(r"^step (?P<step>\d+) loss (?P<loss>\S+)$", re.MULTILINE)
# No GPU, and one thread, with which sums of floats are the same in each run.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(example: str, directory: Path, steps: int) -> tuple[dict[int, str], str]:
    """Return the loss of each step, as printed, and all that was printed."""
    if example in ("image", "webdataset"):
        pytest.importorskip("PIL")
    program = EXAMPLES / f"{example}_training.py"
    command = [program, "--directory", directory, "--steps", str(steps)]
    done = support_warm.run(command, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(m["step"]): m["loss"] for m in LOSS.finditer(done.stdout)}, done.stdout


@pytest.mark.parametrize(("example", "steps"), [("tfrecord", 30), ("webdataset", 30)])
def test_learns(tmp_path: Path, example: str, steps: int) -> None:
    losses, _ = run(example, tmp_path / "data", steps)
    assert list(losses) == list(range(1, steps + 1))
    assert float(losses[steps]) < float(losses[1]) / 2


# Image: 11 steps an epoch, so the second run begins within one and ends in the next.
@pytest.mark.parametrize(("example", "before", "steps"), [("image", 8, 30), ("token", 8, 30)])
def test_continues_with_the_same_batches(tmp_path: Path, example: str, before: int, steps: int) -> None:
    whole, _ = run(example, tmp_path / "whole", steps)
    assert list(whole) == list(range(1, steps + 1))
    assert float(whole[steps]) < float(whole[1]) * 0.8
    first, _ = run(example, tmp_path / "parts", before)
    rest, printed = run(example, tmp_path / "parts", steps)
    assert f"resumed after step {before}, in epoch 0" in printed
    assert list(rest) == list(range(before + 1, steps + 1))
    assert first | rest == whole
