#!/usr/bin/env python3
"""What saving does on filesystems that lack something, or refuse something.

    unshare --mount python filesystem_checks.py {saves,read-only,quota,too-large} KIND

Exits with 0 where all held.
"""

import argparse
import errno
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from support_loop import LoopFilesystem

import trunkline as tl

MIB = 1 << 20


def state(value: int, nbytes: int = MIB) -> dict[str, torch.Tensor]:
    return {"large": torch.full((nbytes,), value, dtype=torch.uint8), "small": torch.full((3,), value)}


def assert_holds(path: Path, value: int) -> None:
    found = tl.load(path)
    assert bool((found["large"] == value).all())
    assert bool((found["small"] == value).all())


def assert_refused(save: Callable[[], object], code: int) -> None:
    try:
        save()
    except OSError as error:
        assert isinstance(error, tl.Error), repr(error)  # noqa: PT017
        assert error.errno == code, repr(error)  # noqa: PT017
        return
    raise AssertionError("it was not refused")


def saves(loop: LoopFilesystem) -> None:
    """All kinds of files, new and replaced; a directory of checkpoints; and all that after a new mount."""
    root = loop.path
    for name in ("a.pt", "a.safetensors"):
        path = root / name
        tl.save(state(1), path)
        if loop.kind != "vfat":  # which has no modes
            path.chmod(0o600)
        mode = path.stat().st_mode
        for durable in (True, False):
            tl.save(state(2), path, durable=durable)
            assert path.stat().st_mode == mode
        tl.save_async(state(3), path).wait()
        assert_holds(path, 3)
        assert torch.equal(tl.load(path, mmap=True)["large"], state(3)["large"])
    checkpoints = tl.Checkpointer(root / "run", keep=2, process_group=False)
    for step in range(4):
        checkpoints.save(step, state(step), block=step % 2 == 0).wait()
    assert checkpoints.steps() == [2, 3]
    checkpoints.verify()
    loop.unmount()
    loop.mount()
    assert sorted(path.name for path in root.iterdir() if path.name != "lost+found") == [
        "a.pt",
        "a.safetensors",
        "run",
    ]
    assert_holds(root / "a.pt", 3)
    again = tl.Checkpointer(root / "run", process_group=False)
    assert torch.equal(again.load()["large"], state(3)["large"])


def read_only(loop: LoopFilesystem) -> None:
    """A filesystem that turns read-only, as one with errors does: what is there stays, and can be loaded."""
    root = loop.path
    path = root / "a.pt"
    tl.save(state(1), path)
    checkpoints = tl.Checkpointer(root / "run", process_group=False)
    checkpoints.save(1, state(1), block=True)
    under_way = tl.save_async(state(2), root / "b.pt")
    under_way.wait()
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    assert_refused(lambda: tl.save(state(3), path), errno.EROFS)
    assert_refused(lambda: tl.save(state(3), root / "new.pt"), errno.EROFS)
    assert_refused(lambda: checkpoints.save(2, state(2), block=True), errno.EROFS)
    assert_holds(path, 1)
    assert tl.Checkpointer(root / "run", process_group=False).latest() == 1
    assert bool((checkpoints.load()["small"] == 1).all())
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    tl.save(state(3), path)
    checkpoints.save(2, state(2), block=True)


def quota(loop: LoopFilesystem) -> None:
    """A quota that is used up in the midst of a save over an older file."""
    root = loop.path / "limited"
    subprocess.run(["btrfs", "quota", "enable", str(loop.path)], check=True)
    subprocess.run(["btrfs", "subvolume", "create", str(root)], check=True, capture_output=True)
    subprocess.run(["btrfs", "qgroup", "limit", str(8 * MIB), str(root)], check=True)
    path = root / "a.pt"
    tl.save(state(1), path)
    checkpoints = tl.Checkpointer(root / "run", process_group=False)
    checkpoints.save(1, state(1), block=True)
    for save in (
        lambda: tl.save(state(2, 30 * MIB), path),
        lambda: tl.save_async(state(2, 30 * MIB), path).wait(),
        lambda: checkpoints.save(2, state(2, 30 * MIB), block=True),
    ):
        assert_refused(save, errno.EDQUOT)
        assert_holds(path, 1)
        assert checkpoints.steps() == [1]
        assert not list(root.glob(".trunkline-*"))
    tl.save(state(2), path)
    assert_holds(path, 2)


def too_large(loop: LoopFilesystem) -> None:
    """A file beyond the largest that vfat can hold, found before anything is written."""
    path = loop.path / "a.pt"
    tl.save(state(1), path)
    # Never touched: it takes no memory.
    assert_refused(lambda: tl.save({"w": torch.empty(1 << 32, dtype=torch.uint8)}, path), errno.EFBIG)
    assert_holds(path, 1)
    assert [entry.name for entry in loop.path.iterdir()] == ["a.pt"]


def main() -> None:
    checks: dict[str, Callable[[LoopFilesystem], None]] = {
        "saves": saves,
        "read-only": read_only,
        "quota": quota,
        "too-large": too_large,
    }
    parser = argparse.ArgumentParser(description="Save on filesystems that refuse something.")
    parser.add_argument("check", choices=checks)
    parser.add_argument("kind")
    options = parser.parse_args()
    with LoopFilesystem(options.kind) as loop:
        checks[options.check](loop)


if __name__ == "__main__":
    main()
