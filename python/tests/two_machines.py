#!/usr/bin/env python3
"""Two machines share a filesystem whose locks end at each: one saves, the other opens and collects.

    unshare --mount python two_machines.py

Simulated by two processes on a filesystem of FUSE, where the library cannot know who else writes, each
under a filter that grants every lock. Exits with 0 where all held.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from sandboxed import SANDBOXES
from support_loop import LoopFilesystem
from support_seccomp import forbid

STEPS = 25
KILOBYTES = 600


def value_of(step: int) -> int:
    return step % 251


def save_steps(root: Path) -> list[int]:
    """Return the steps that were reported as saved."""
    import torch

    import trunkline as tl

    checkpoints = tl.Checkpointer(root / "run", keep=None)
    saved = []
    for step in range(STEPS):
        state = {"x": torch.full((KILOBYTES << 10,), value_of(step), dtype=torch.uint8)}
        try:
            checkpoints.save(step, state, block=True)
            saved.append(step)
        except tl.Error as error:
            print(f"step {step}: {error}", file=sys.stderr)
        tl.save(state, root / "last.safetensors")
    return saved


def interfere(root: Path) -> list[int]:
    """Open the directory, which collects, and save beside its files, until there is a file `over`."""
    import torch

    import trunkline as tl

    opened = 0
    while not (root / "over").exists():
        tl.Checkpointer(root / "run").steps()
        tl.save({"y": torch.ones(1000)}, root / "other.safetensors")
        opened += 1
    return [opened]


def machine(role: str, root: Path) -> None:
    forbid(*SANDBOXES["two-machines"])
    print(json.dumps(save_steps(root) if role == "saves" else interfere(root)))


def check() -> None:
    with LoopFilesystem("fuse2fs") as loop:
        root = loop.path
        machines = {
            role: subprocess.Popen(
                [sys.executable, __file__, role, str(root)], stdout=subprocess.PIPE, text=True
            )
            for role in ("interferes", "saves")
        }
        output = {}
        for role in ("saves", "interferes"):
            output[role], _ = machines[role].communicate(timeout=200)
            assert machines[role].returncode == 0, role
            if role == "saves":
                (root / "over").touch()
        saved = json.loads(output["saves"])
        print(f"{len(saved)} of {STEPS} saved, opened {output['interferes'].strip()} times meanwhile")
        assert json.loads(output["interferes"])[0] > 0

        import torch

        import trunkline as tl

        checkpoints = tl.Checkpointer(root / "run")
        assert set(saved) <= set(checkpoints.steps())
        for step in checkpoints.steps():
            assert torch.equal(
                checkpoints.load(step)["x"],
                torch.full((KILOBYTES << 10,), value_of(step), dtype=torch.uint8),
            )
        expected = torch.full((KILOBYTES << 10,), value_of(STEPS - 1), dtype=torch.uint8)
        assert torch.equal(tl.load(root / "last.safetensors")["x"], expected)
        assert saved, "no save came through"


if __name__ == "__main__":
    begun = time.monotonic()
    if len(sys.argv) > 1:
        machine(sys.argv[1], Path(sys.argv[2]))
    else:
        check()
        print(f"{time.monotonic() - begun:.1f} s")
