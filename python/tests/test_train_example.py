"""examples/train.py under torchrun: killed at any moment and started again, it ends as if it had not been."""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.py"
STEPS = 16
HIDDEN = "384"  # the state has more than a megabyte, so that both ranks write
TIMEOUT = 120
LOSS = re.compile(r"step (?P<step>\d+) loss (?P<loss>\S+)")
# Nothing of a torchrun or a GPU around the tests, and one thread a rank.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")},
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def descendants(pid: int) -> list[int]:
    """The process and its descendants: torchrun puts each worker into a separate process group."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL to torchrun, which is stopped first so that it starts nothing more, and to its workers."""
    process.send_signal(signal.SIGSTOP)
    for pid in reversed(descendants(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def train(directory: Path, ranks: int, *options: str, steps: int = STEPS) -> Iterator[subprocess.Popen[str]]:
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    arguments = ["--directory", str(directory), "--steps", str(steps), "--hidden", HIDDEN, *options]
    with subprocess.Popen(
        [sys.executable, *launch, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_all(process)


def finish(directory: Path, ranks: int, *options: str, steps: int = STEPS) -> str:
    """Run it to its end; what it printed."""
    with train(directory, ranks, *options, steps=steps) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    return output


def kill_after(directory: Path, ranks: int, step: int) -> str:
    """Run it until it says that it did `step`, kill it, and return what it printed until then."""
    output = ""
    with train(directory, ranks) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            found = LOSS.match(line)
            if found and int(found["step"]) == step:
                kill_all(process)
                break
        output += process.stdout.read()
        process.wait(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGKILL, output
    return output


def losses(output: str) -> dict[int, str]:
    return {int(found["step"]): found["loss"] for found in LOSS.finditer(output)}


def final_state(directory: Path) -> dict[str, Any]:
    checkpointer = tl.Checkpointer(directory, process_group=False)
    assert checkpointer.latest() == STEPS
    checkpointer.verify()
    state: dict[str, Any] = checkpointer.load()
    assert state["step"] == STEPS
    return state


def assert_same(one: Any, other: Any) -> None:
    """Equal bit for bit, optimizer and random numbers included."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


def test_it_does_not_start_anew_where_a_checkpoint_lacks_a_shard(tmp_path: Path) -> None:
    finish(tmp_path, 1, steps=3)
    (shard, *_) = tmp_path.glob("step-00000003/shard-*")
    shard.unlink()
    with train(tmp_path, 1) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert "trunkline.Corrupt: step 3" in output
    assert losses(output) == {}
    assert tl.Checkpointer(tmp_path, process_group=False).steps() == [1, 2, 3]


def test_killed_and_resumed_it_ends_as_uninterrupted(tmp_path: Path) -> None:
    reference = losses(finish(tmp_path / "reference", 2))
    assert sorted(reference) == list(range(1, STEPS + 1))

    seed = random.randrange(2**32)
    step = random.Random(seed).randrange(1, STEPS - 1)
    killed = losses(kill_after(tmp_path / "killed", 2, step))
    output = finish(tmp_path / "killed", 2)
    resumed = losses(output)

    assert len(list((tmp_path / "reference").rglob("*.safetensors"))) == 3 * 2  # checkpoints, ranks
    about = f"killed after step {step} (seed {seed})\n{output}"
    if found := re.search(r"resumed after step (\d+)", output):
        # Step n is saved during step n + 1, and step n + 2 waits for that: at most one step is lost.
        assert int(found[1]) >= step - 1, about
    else:
        assert step == 1, about
    assert killed.items() <= reference.items(), about
    assert resumed.items() <= reference.items(), about
    assert killed.keys() | resumed.keys() == reference.keys(), about
    assert_same(final_state(tmp_path / "killed"), final_state(tmp_path / "reference"))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_it_goes_on_with_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    finish(tmp_path, before, steps=2)
    output = finish(tmp_path, after, steps=3)
    assert "resumed after step 2" in output
    assert losses(output).keys() == {3}


def test_one_process_over_volumes(tmp_path: Path) -> None:
    volumes = [tmp_path / "disk0", tmp_path / "disk1"]
    for volume in volumes:
        volume.mkdir()
    options = ("--volumes", *map(str, volumes), "--layers", "3", "--keep", "2")
    output = finish(tmp_path / "run", 1, *options)
    assert losses(output).keys() == set(range(1, STEPS + 1))
    assert tl.Checkpointer(tmp_path / "run", process_group=False).steps() == [STEPS - 1, STEPS]
    assert all(list(volume.rglob("*.safetensors")) for volume in volumes)
    assert sum(name.endswith("weight") for name in final_state(tmp_path / "run")["model"]) == 4


def test_no_step_before_the_checkpoint_has_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noted(torch.optim.AdamW, "step")
    noted(tl.Checkpointer, "save")
    noted(tl.SaveHandle, "wait_staged")
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--directory", str(tmp_path), "--steps", "3", "--hidden", "8"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert events == ["step", "save", "wait_staged", "step", "save", "wait_staged", "step", "save"]
