#!/usr/bin/env python3
"""What is saved and loaded where system calls are missing or refused.

    python sandboxed.py DIRECTORY {SANDBOX}

Exits with 0 where all held.
"""

import errno
import fcntl
import sys
from pathlib import Path

from support_seccomp import forbid

_IO_URING = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_NEWER_THAN_MANY_PROFILES = (*_IO_URING, "openat2", "statx", "renameat2")
SANDBOXES: dict[str, tuple[dict[str, int], dict[int, int]]] = {
    # Docker's and Kubernetes' usual profile forbids io_uring; old ones refuse all that they do not know.
    "docker": (dict.fromkeys(_IO_URING, errno.EPERM), {}),
    "old-docker": (dict.fromkeys(_NEWER_THAN_MANY_PROFILES, errno.EPERM), {}),
    # Kernels of their own, such as gVisor's.
    "own-kernel": (
        dict.fromkeys((*_NEWER_THAN_MANY_PROFILES, "io_setup", "sync_file_range"), errno.ENOSYS),
        {},
    ),
    # Some network filesystems: no flags of rename, no preallocation, no locks.
    "network": (
        {"renameat2": errno.EINVAL, "fallocate": errno.EOPNOTSUPP},
        dict.fromkeys((fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW), errno.ENOLCK),
    ),
    # Locks that other machines do not see: every attempt succeeds.
    "two-machines": ({}, dict.fromkeys((fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW), 0)),
}


def main() -> None:
    root, sandbox = Path(sys.argv[1]), sys.argv[2]
    calls, commands = SANDBOXES[sandbox]
    forbid(calls, commands)

    import torch

    import trunkline as tl

    def state(value: int) -> dict[str, torch.Tensor]:
        return {"large": torch.full((3 << 20,), value, dtype=torch.uint8), "small": torch.tensor([value])}

    def assert_holds(found: dict[str, torch.Tensor], value: int) -> None:
        assert torch.equal(found["large"], state(value)["large"])
        assert torch.equal(found["small"], state(value)["small"])

    if _IO_URING[0] in calls:
        with tl.Engine() as engine:
            assert engine.backend != "io_uring"
    for name in ("a.pt", "a.safetensors"):
        for value in (1, 2):  # new, and replaced
            tl.save(state(value), root / name)
            assert_holds(tl.load(root / name), value)
        tl.save_async(state(3), root / name).wait()
        assert_holds(tl.load(root / name), 3)
    checkpoints = tl.Checkpointer(root / "run", keep=2, volumes=[root / "v0", root / "v1"])
    for step in range(3):
        checkpoints.save(step, state(step)).wait()
    assert_holds(tl.Checkpointer(root / "run").load(), 2)
    into = state(0)
    tl.Checkpointer(root / "run").load(1, into=into)
    assert_holds(into, 1)
    assert tl.Checkpointer(root / "run").steps() == [1, 2]
    checkpoints = tl.Checkpointer(root / "run", fresh=True)
    checkpoints.save(1, state(5), block=True)
    assert_holds(checkpoints.load(), 5)
    assert not list(root.rglob(".trunkline-*"))


if __name__ == "__main__":
    main()
