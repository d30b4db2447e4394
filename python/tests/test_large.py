"""More than 4 GiB in one call."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

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


@pytest.mark.large
@pytest.mark.skipif(available_memory_bytes() < 12e9, reason="less than 12 GB of memory available")
def test_a_pt_file_with_a_storage_of_more_than_4_gib(tmp_path: Path) -> None:
    """Its size, and the place of what follows it, need the zip64 form."""
    if shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("less than 6 GB of disk free")
    path = tmp_path / "large.pt"
    large = torch.zeros(SIZE, dtype=torch.uint8)
    for place in (0, (4 << 30) - 1, SIZE - 1):
        large[place] = 7
    tl.save({"large": large, "after": torch.arange(5)}, path, durable=False)
    del large
    try:
        for loaded in (
            torch.load(path, weights_only=True, mmap=True),
            tl.load(path, mmap=True, verify=True),  # reads all, and compares it with its CRC-32
        ):
            found = loaded["large"]
            assert found.numel() == SIZE
            assert [int(found[place]) for place in (0, 1, (4 << 30) - 1, SIZE - 1)] == [7, 0, 7, 7]
            assert loaded["after"].tolist() == [0, 1, 2, 3, 4]
    finally:
        path.unlink()
