"""DeepSpeed's aio handle as a peer, where the module deepspeed is installed (its first use compiles for
minutes).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from measurement import spent
from workbench import DEPTH, MIB, Workbench, rates


def why_not_deepspeed() -> str:
    """Empty when it can run."""
    if importlib.util.find_spec("deepspeed") is None:
        return "the module deepspeed is not installed"
    try:
        importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load()
    except Exception as error:  # whatever its build or import raises
        return f"deepspeed's aio does not load: {error}"
    return ""


class DeepSpeedAio:
    """One thread, 1 MiB blocks, depth 32, as its own locked tensor wants it."""

    def __init__(self, bench: Workbench, path: Path) -> None:
        module: Any = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load()
        # block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
        self._handle = module.aio_handle(MIB, DEPTH, False, True, 1)
        self._memory = self._handle.new_cpu_locked_tensor(bench.bytes, bench.source)
        self._bench = bench
        self._path = path
        with bench.without_limit():
            self.write()

    def write(self) -> float:
        """CPU s/GB of a write and the fsync that it leaves to its caller."""
        self._memory.copy_(self._bench.source)
        self._path.unlink(missing_ok=True)
        self._bench.disks.rest()
        with spent() as time:
            self._handle.sync_pwrite(self._memory, str(self._path), 0)
            with self._path.open("rb+") as file:
                os.fsync(file.fileno())
        return rates(self._bench.bytes, time.seconds, time.cpu_seconds)[1]

    def read(self) -> float:
        self._memory.zero_()
        self._bench.disks.rest()
        with spent() as time:
            self._handle.sync_pread(self._memory, str(self._path), 0)
        self._bench.check(self._memory, "what DeepSpeed read")
        return rates(self._bench.bytes, time.seconds, time.cpu_seconds)[1]

    def remove(self) -> None:
        self._handle.free_cpu_locked_tensor(self._memory)
        self._path.unlink()
