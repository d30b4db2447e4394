"""One call over all bytes through the Python API, beside fio with the same total: on one disk, and on a
Volume of several (fio: on as many files).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from measurement import Comparison, interleave
from workbench import Open, Workbench

import trunkline as tl


def measure(bench: Workbench) -> list[Comparison]:
    directories = bench.disks.directories
    path = bench.first / "sequential"
    rows = compare(bench, "one disk", lambda mode: tl.open(path, mode), [bench.first / "fio"], 0.99)
    path.unlink()
    if len(directories) > 1:
        volume = tl.Volume(directories)
        place = f"Volume of {len(directories)}"
        files = [directory / "fio" for directory in directories]
        rows += compare(bench, place, lambda mode: volume.open("striped", mode), files, 0.98)
        volume.remove("striped")
    return rows


def compare(
    bench: Workbench, place: str, open_file: Open, fio_files: list[Path], at_least: float
) -> list[Comparison]:
    memories = {"page-aligned": bench.pinned, "ordinary torch": bench.ordinary}
    bench.fill(open_file)
    rows = []
    for rw in ("read", "write"):

        def ours(memory: torch.Tensor, rw: str = rw) -> Callable[[], float]:
            return lambda: bench.transfer(rw, open_file, memory)[0]

        ways: dict[str, Callable[[], float]] = {name: ours(memory) for name, memory in memories.items()}
        ways["fio"] = lambda rw=rw: bench.fio(fio_files, rw)[0]  # type: ignore[misc]
        got = interleave(bench.rounds, ways, f"sequential, {place}, {rw}")
        peer = "fio" if len(fio_files) == 1 else f"fio on {len(fio_files)} files"
        rows += [
            Comparison(
                *("sequential", f"{place}, {rw}, {name} memory", "GB/s", peer, got[name], got["fio"]),
                at_least=at_least,
            )
            for name in memories
        ]
    for file in fio_files:
        file.unlink()
    return rows
