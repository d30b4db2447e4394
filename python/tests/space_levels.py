#!/usr/bin/env python3
"""Saves on filesystems that are filled to different levels.

    unshare --mount python space_levels.py {ext4,tmpfs}

At each level a save either succeeds or fails with ENOSPC; then the checkpoint and the files that were there
before are whole, nothing of the attempt is left (its space is free again while the error is still held), and
saving works once there is room. Prints a line of counts; the exit status is 0 if all held.
"""

import argparse
import ctypes
import errno
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support_crash import assert_same, state_of, tensors_of
from support_loop import LoopFilesystem

import trunkline as tl

_FILESYSTEM_BYTES = 48 << 20
_BLOCK = 4096
# Parts of the space that a save takes; and block by block where only the last bytes are missing.
_LEVELS = [("part", tenth) for tenth in range(10)] + [("blocks", blocks) for blocks in range(-2, 8)]


@contextmanager
def filesystem(kind: str) -> Iterator[Path]:
    """Make a small filesystem."""
    if kind == "ext4":
        with LoopFilesystem("ext4", _FILESYSTEM_BYTES) as loop:
            yield loop.path
        return
    with tempfile.TemporaryDirectory(prefix="trunkline-space-") as name:
        options = f"size={_FILESYSTEM_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def free_bytes(root: Path) -> int:
    """Return what can still be written."""
    fd = os.open(root, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(fd)  # blocks that were freed count only then
        about = os.fstatvfs(fd)
    finally:
        os.close(fd)
    return about.f_bavail * about.f_frsize


class Level:
    """A filesystem that is filled until so many bytes are free."""

    def __init__(self, root: Path, free: int) -> None:
        self._filler = root / "filler"
        with self._filler.open("wb") as file:
            step = _FILESYSTEM_BYTES
            while (excess := free_bytes(root) - max(0, free)) >= _BLOCK and step >= _BLOCK:
                step = min(step, excess)
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, step)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 2  # the filesystem's own blocks for it did not fit as well

    def empty(self) -> None:
        """Make room."""
        self._filler.unlink()


def names(root: Path) -> set[str]:
    """Return all that is there, but for the filler."""
    return {str(path.relative_to(root)) for path in root.rglob("*")} - {"filler"}


def attempt(root: Path, save: Callable[[], None], counts: Counter[str]) -> bool:
    """Save; where that fails, assert that it does so cleanly."""
    before, free = names(root), free_bytes(root)
    try:
        save()
    except OSError as error:
        assert isinstance(error, tl.Error), repr(error)  # noqa: PT017 - and more is to be asserted meanwhile
        assert error.errno == errno.ENOSPC, repr(error)  # noqa: PT017
        # While the error, and with it all that it refers to, is still there.
        assert names(root) == before, names(root) ^ before
        # io_uring lets go of a file shortly after the write to it has ended.
        deadline = time.monotonic() + 5
        while free_bytes(root) < free - _BLOCK and time.monotonic() < deadline:
            time.sleep(0.01)
        assert free_bytes(root) >= free - _BLOCK, (free_bytes(root), free)
        counts["failed"] += 1
        return False
    counts["saved"] += 1
    return True


def run_steps(root: Path, block: bool) -> Counter[str]:
    """Checkpoints at all levels."""
    counts: Counter[str] = Counter()
    checkpointer = tl.Checkpointer(root / "steps", keep=1, process_group=False)
    step = 1
    start = free_bytes(root)
    checkpointer.save(step, state_of(step, step), block=True)
    needed = start - free_bytes(root)

    def save() -> None:
        checkpointer.save(step + 1, state_of(step + 1, step + 1), block=block).wait()

    for how, amount in _LEVELS:
        level = Level(root, needed * amount // 10 if how == "part" else needed - amount * _BLOCK)
        if not attempt(root, save, counts):
            assert checkpointer.steps() == [step]
            assert_same(checkpointer.load(), state_of(step, step), "the one before")
            level.empty()
            save()
        else:
            level.empty()
        step += 1
        assert_same(checkpointer.load(), state_of(step, step), "the new one")
        assert checkpointer.steps() == [step]
    shutil.rmtree(root / "steps")
    return counts


def run_files(root: Path, name: str, save_file: Callable[[Any, Path], None]) -> Counter[str]:
    """Single files over existing ones at all levels."""
    counts: Counter[str] = Counter()
    path = root / name
    version = 1
    start = free_bytes(root)
    tl.save(tensors_of(version), path)
    needed = start - free_bytes(root)

    def load() -> dict[str, Any]:
        found = tl.load(path)
        return {key: found[key] for key in tensors_of(0)}

    for how, amount in _LEVELS:
        level = Level(root, needed * amount // 10 if how == "part" else needed - amount * _BLOCK)
        new = tensors_of(version + 1)
        if not attempt(root, lambda: save_file(new, path), counts):  # noqa: B023
            assert_same(load(), tensors_of(version), "the one before")
            level.empty()
            save_file(new, path)
        else:
            level.empty()
        version += 1
        assert_same(load(), tensors_of(version), "the new one")
    path.unlink()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Save on filesystems that are filled to different levels.")
    parser.add_argument("filesystem", choices=["ext4", "tmpfs"])
    options = parser.parse_args()
    ways: dict[str, Callable[[Path], Counter[str]]] = {
        "checkpoint": lambda root: run_steps(root, block=False),
        "checkpoint_blocking": lambda root: run_steps(root, block=True),
        "pt": lambda root: run_files(root, "file.pt", tl.save),
        "safetensors": lambda root: run_files(root, "file.safetensors", tl.save),
        "pt_async": lambda root: run_files(
            root, "file.pt", lambda obj, path: tl.save_async(obj, path).wait()
        ),
    }
    with filesystem(options.filesystem) as root:
        print(json.dumps({way: run(root) for way, run in ways.items()}))


if __name__ == "__main__":
    main()
