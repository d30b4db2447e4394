"""trunkline.dcp.Checkpointer after Ctrl-C, or anything else that a signal handler raises, at any moment."""

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import trunkline as tl
from trunkline.dcp import _checkpointer, run_directory

SIZE = 1 << 16
MODULES = (
    "/dcp/_checkpointer.py",
    "/dcp/_task.py",
    "/dcp/_run_ranks.py",
    "/dcp/running_saves.py",
    "/turn.py",
)


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


class InterruptAt:
    """Raises Interrupt at the `left`th event in some modules, as a profiler (sys.setprofile).

    Python runs signal handlers after calls and at the start of functions, which a profiler sees.
    """

    def __init__(self, modules: "str | tuple[str, ...]") -> None:
        self._modules = modules
        self.left = 0

    def __call__(self, frame: FrameType, event: str, what: object) -> None:
        if event == "c_call" or not frame.f_code.co_filename.endswith(self._modules):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise Interrupt


@pytest.fixture(autouse=True)
def torch_may_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), float(step)), "step": step}


def assert_sound(checkpoints: "tl.dcp.Checkpointer", run: Path, volume: Path, keep: int) -> None:
    """All steps can be loaded, no more than `keep` are there, and no shard is without a link."""
    steps = checkpoints.steps()
    assert len(steps) <= keep
    for step in steps:
        into = {"w": torch.zeros(SIZE), "step": -1}
        tl.dcp.Checkpointer(run).load(into, step)
        assert into["step"] == step
        assert torch.equal(into["w"], state(step)["w"])
    assert {path.name for path in volume.iterdir()} == {path.name for path in run.glob("step-*/*.shard")}
    assert run_directory.collect(run, dry_run=True).removed == []


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_interrupts_at_random_moments(tmp_path: Path, call: str) -> None:
    run, volume, rng = tmp_path / "run", tmp_path / "v", random.Random(7)
    checkpoints = tl.dcp.Checkpointer(run, keep=2, volumes=[volume])
    checkpoints.save(0, state(0))
    interrupts = 0
    began = time.monotonic()

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        step = 0
        while time.monotonic() - began < 2 or (interrupts < 5 and time.monotonic() - began < 60):
            step += rng.randint(0, 1)  # the same one again, or the next
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0002, 0.02))
                    getattr(checkpoints, call)(step, state(step))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupts += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts >= 5
    checkpoints.wait()
    checkpoints.save(step + 1, state(step + 1))
    assert checkpoints.latest() == step + 1
    assert_sound(checkpoints, run, volume, 2)


@pytest.mark.parametrize("call", ["save", "async_save", "delete"])
def test_an_interrupt_at_each_point_of_a_call(tmp_path: Path, call: str) -> None:
    run, volume = tmp_path / "run", tmp_path / "v"
    checkpoints = tl.dcp.Checkpointer(run, keep=2, volumes=[volume])
    interrupt, points = InterruptAt(MODULES), 0

    for point in range(1, 500):
        if call == "delete":
            checkpoints.save(1, state(1))
        interrupt.left = point
        try:
            sys.setprofile(interrupt)
            checkpoints.delete(1) if call == "delete" else getattr(checkpoints, call)(point, state(point))
        except Interrupt:
            points = point
        finally:
            sys.setprofile(None)
        if interrupt.left > 0:
            break
        checkpoints.wait()
    assert points > 20
    checkpoints.save(1000, state(1000))
    assert checkpoints.latest() == 1000
    assert_sound(checkpoints, run, volume, 2)


def test_gradients_stay_enabled_after_an_interrupt(tmp_path: Path) -> None:
    """Torch disables them while it copies the state; an interrupt may come before it enables them again."""
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=1)
    checkpoints.save(1, state(1))
    interrupt, points = InterruptAt("/autograd/grad_mode.py"), 0

    for point in range(1, 500):
        interrupt.left = point
        try:
            sys.setprofile(interrupt)
            checkpoints.async_save(1, state(1))
        except Interrupt:
            points = point
        finally:
            sys.setprofile(None)
            enabled = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
        assert enabled, point
        if interrupt.left > 0:
            break
    checkpoints.wait()
    assert points > 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_save_is_cancelled_unless_it_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The state may change as soon as the interrupt is raised: nothing reads it any more."""
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=1)
    checkpoints.save(1, state(1))
    stock = _checkpointer.save

    def interrupted(*arguments: Any, **options: Any) -> None:
        if when == "after":
            stock(*arguments, **options)
        os.kill(os.getpid(), signal.SIGALRM)
        task = checkpoints._pending
        assert task is not None
        while not task.cancellation.is_requested:
            time.sleep(0.001)
        if when == "before":
            stock(*arguments, **options)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    monkeypatch.setattr(_checkpointer, "save", interrupted)
    try:
        with pytest.raises(Interrupt):
            checkpoints.save(2, state(2))
    finally:
        signal.signal(signal.SIGALRM, before)
        monkeypatch.undo()
    assert checkpoints.steps() == ([1] if when == "before" else [2])
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"step-0000000{checkpoints.latest()}"]
    checkpoints.save(2, state(2))
    assert checkpoints.steps() == [2]


def test_a_checkpoint_is_known_though_its_save_failed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=1)
    stock = _checkpointer.save

    def fails(*arguments: Any, **options: Any) -> None:
        stock(*arguments, **options)
        raise OSError(5, "after the commit")

    monkeypatch.setattr(_checkpointer, "save", fails)
    with pytest.raises(OSError, match="after the commit"):
        checkpoints.save(1, state(1))
    monkeypatch.undo()
    checkpoints.save(1, state(1))
    checkpoints.save(2, state(2))
    assert checkpoints.steps() == [2]
