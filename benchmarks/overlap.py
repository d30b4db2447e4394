"""Saving while training goes on: how long the caller is held beside a plain copy of the state, what a
training loop loses that saves every step, and how much memory a save takes beside the state.

The training step is a real one (forward, backward, AdamW of a small transformer) of about a second, which is
time enough for the disk to take the state (0.15 GB) of the step before.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import model_state
import torch
from measurement import Comparison, interleave, progress
from workbench import Workbench

import trunkline as tl

STEPS = 8


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    rows = [held(bench), lost(bench)]
    with bench.without_limit():
        return [*rows, *peak_memory(bench)]


def held(bench: Workbench) -> Comparison:
    """Seconds until the tensors may change again, beside copying them into memory that is there already."""
    state = bench.state
    copy = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in state.items()}
    checkpointer = tl.Checkpointer(bench.first / "steps", keep=1, staging_bytes=2 * bench.bytes)
    step = 0

    def save() -> float:
        nonlocal step
        step += 1
        bench.disks.rest()
        start = time.perf_counter()
        handle = checkpointer.save(step, state)
        handle.wait_staged()
        seconds = time.perf_counter() - start
        handle.wait()
        return seconds

    def plain_copy() -> float:
        bench.disks.rest()
        start = time.perf_counter()
        for name, tensor in state.items():
            ctypes.memmove(copy[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return time.perf_counter() - start

    got = interleave(bench.rounds, {"ours": save, "copy": plain_copy}, "overlap, held")
    if not model_state.same(checkpointer.load(), state):
        raise SystemExit("bench: what was saved in the background differs from the state")
    shutil.rmtree(bench.first / "steps")
    return Comparison(
        *(
            "overlap",
            "caller is held, s",
            "see rows",
            "memcpy of the state, one thread",
            got["ours"],
            got["copy"],
        ),
        at_most=1.3,
    )


class Training:
    """A small transformer that learns to repeat; one step takes about a second or more."""

    def __init__(self, seconds: float) -> None:
        torch.manual_seed(3)
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
        self.model = torch.nn.TransformerEncoder(layer, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(8, 64, 512)
        self.repeats = 1
        self.step()
        start = time.perf_counter()
        self.step()
        self.repeats = max(1, round(seconds / (time.perf_counter() - start)))

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.repeats):  # gradient accumulation
            loss = (self.model(self.batch) - self.batch).square().mean()
            loss.backward()
        before_update()
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def lost(bench: Workbench) -> Comparison:
    """Seconds of a loop that saves every step, beside the same without."""
    training = Training(1.0)
    checkpointer = tl.Checkpointer(bench.first / "steps", keep=2)

    def with_saves() -> float:
        handle: tl.SaveHandle | None = None

        def before_update() -> None:
            if handle is not None:
                handle.wait_staged()

        start = time.perf_counter()
        for number in range(STEPS):
            training.step(before_update)
            handle = checkpointer.save(number, training.state())
        checkpointer.wait()
        return time.perf_counter() - start

    def without() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            training.step()
        return time.perf_counter() - start

    got = interleave(bench.rounds, {"ours": with_saves, "without": without}, "overlap, lost")
    shutil.rmtree(bench.first / "steps")
    return Comparison(
        *("overlap", f"{STEPS} training steps, each saved, s", "see rows", "the same, none saved"),
        *(got["ours"], got["without"]),
        at_most=1.05,
    )


_MEMORY_SCRIPT = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    import model_state, torch
    import trunkline as tl

    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

    def restart_peak():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return peak()

    path, nbytes, staging = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    state = model_state.make(nbytes)
    tl.save({"x": torch.ones(1 << 20)}, path + "/warm.pt")
    result = {}
    for name, save in {
        ".pt": lambda: tl.save(state, path + "/m.pt"),
        ".safetensors": lambda: tl.save(state, path + "/m.safetensors"),
        "Checkpointer, in the background": lambda: tl.Checkpointer(
            path + "/steps", staging_bytes=staging).save(1, state).wait(),
        "torch.save": lambda: torch.save(state, path + "/m.pt"),
    }.items():
        before = restart_peak()
        save()
        result[name] = (peak() - before) / 1e9
    print(json.dumps(result))
"""


def peak_memory(bench: Workbench) -> list[Comparison]:
    """GB beside the state, as the kernel counts resident memory at its peak."""
    staging = 256 << 20
    directory = bench.first / "memory"
    directory.mkdir()
    arguments = [str(Path(__file__).parent), str(directory), str(bench.bytes), str(staging)]
    runs: dict[str, list[float]] = {}
    for number in range(3):
        progress(f"overlap, memory: run {number + 1} of 3")
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(_MEMORY_SCRIPT), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"bench: measuring memory failed: {done.stderr}")
        for name, value in json.loads(done.stdout).items():
            runs.setdefault(name, []).append(value)
        shutil.rmtree(directory)
        directory.mkdir()
    shutil.rmtree(directory)
    # Ring of a blocking save 64 MiB; lanes' bounce blocks come on top.
    most = {".pt": 0.2, ".safetensors": 0.2, "Checkpointer, in the background": (staging + (128 << 20)) / 1e9}
    return [
        Comparison(
            *("overlap", f"memory beside the state, {name}, GB", "see rows", "torch.save"),
            *(runs[name], runs["torch.save"]),
            compared="ours",
            at_most=round(bound, 3),
        )
        for name, bound in most.items()
    ]
