"""More than 4 GiB in one call."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import trunkline as tl

SIZE = (4 << 30) + 1


def available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.large
@pytest.mark.skipif(available_memory_bytes() < 12e9, reason="less than 12 GB of memory available")
def test_more_than_4_gib_in_one_call(tmp_path: Path) -> None:
    """A sparse file, with marks where 32-bit sizes would wrap and at the end."""
    if shutil.disk_usage(tmp_path).free < 1e9:
        pytest.skip("less than 1 GB of disk free")
    path = tmp_path / "sparse"
    marks = {0: b"start", (2 << 30) - 2: b"two", (4 << 30) - 3: b"end", SIZE - 1: b"!"}
    with path.open("wb") as plain:
        plain.truncate(SIZE)
        for offset, mark in marks.items():
            os.pwrite(plain.fileno(), mark[: SIZE - offset], offset)
    target = np.full(SIZE, 0xFF, np.uint8)
    with tl.Engine(pinned_budget_bytes="256MiB") as engine, tl.open(path, engine=engine) as file:
        assert file.size == SIZE
        assert file.pread(target) == SIZE
        assert engine.stats()["peak_pinned_bytes"] <= 256 << 20
        assert file.async_pread(target[:5], SIZE - 5).result() == 5
    target[:5] = 0
    for offset, mark in marks.items():
        if offset:
            assert target[offset : offset + len(mark)].tobytes() == mark[: SIZE - offset]
            target[offset : offset + len(mark)] = 0
    assert not target.any()
