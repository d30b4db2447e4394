"""examples/fsdp2_training.py as users run it: with torchrun, killed, and run again on other ranks."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trunkline as tl

EXAMPLE = Path(__file__).parents[2] / "examples/fsdp2_training.py"
LIMIT_S = 300


def torchrun(directory: Path, ranks: int, steps: int) -> "subprocess.Popen[str]":
    """Start the example; end it with end()."""
    if not EXAMPLE.exists():
        pytest.skip("the examples are not beside the tests")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(EXAMPLE), "--directory", str(directory), "--steps", str(steps), "--save-every", "2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[str]") -> None:
    """Kill torchrun and its ranks, which have sessions of their own."""
    doomed = [process.pid, *children_of(process.pid)]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and so on."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children_of(child)]
    return found


def run_to_the_end(directory: Path, ranks: int, steps: int) -> str:
    process = torchrun(directory, ranks, steps)
    try:
        said, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said + errors
        return said
    finally:
        end(process)


def weights_of(directory: Path, out: Path) -> dict[str, torch.Tensor]:
    tl.dcp.to_torch_save(directory / "step-00000011", out, key="model")
    loaded: dict[str, torch.Tensor] = torch.load(out)
    return loaded


def test_a_killed_training_continues_to_the_same_weights(tmp_path: Path) -> None:
    process = torchrun(tmp_path / "killed", ranks=2, steps=10_000)
    try:
        assert process.stdout is not None
        for line in process.stdout:  # the save of step 3 has ended once that of step 5 begins
            if line.startswith("step 6 "):
                break
        else:
            pytest.fail(f"it ended: {process.communicate()}")
    finally:
        end(process)
    found = tl.dcp.Checkpointer(tmp_path / "killed", keep=2)
    killed_at = found.latest()
    assert killed_at is not None
    assert killed_at >= 3
    said = run_to_the_end(tmp_path / "killed", ranks=1, steps=12) if killed_at < 11 else ""
    assert f"begins at step {killed_at + 1}\n" in said
    assert f"done; steps [9, 11] in {tmp_path / 'killed'}" in said
    whole = run_to_the_end(tmp_path / "whole", ranks=2, steps=12)
    assert "begins at step 0\n" in whole
    ours, theirs = (weights_of(tmp_path / name, tmp_path / f"{name}.pt") for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name])
