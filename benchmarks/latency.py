"""What a blocking 4 KiB pread costs beside os.preadv of the same aligned block, direct and from the page
cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from measurement import Comparison, interleave
from workbench import Workbench

import trunkline as tl

BLOCK = 4096
CALLS = 5_000  # a round


def measure(bench: Workbench) -> list[Comparison]:
    path = bench.first / "latency"
    bench.disks.limit(0)
    blocks = min(bench.bytes // BLOCK, 4096)
    with tl.open(path, "w") as file:
        file.pwrite(bench.source[: blocks * BLOCK])
        file.sync()
    offsets = [BLOCK * int(n) for n in np.random.default_rng(5).integers(0, blocks, CALLS)]
    rows = compare(bench, path, offsets, "direct", os.O_DIRECT, "auto")
    rows += compare(bench, path, offsets, "page cache", 0, "never")
    path.unlink()
    return rows


def compare(
    bench: Workbench, path: Path, offsets: list[int], way: str, flags: int, direct: Literal["auto", "never"]
) -> list[Comparison]:
    tensor = tl.torch.empty_pinned((BLOCK,), torch.uint8)
    array = tensor.numpy()
    memory = [array.data]
    try:
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        return [Comparison("latency", f"4 KiB, {way}", "us", "os.preadv", [], [], why_not=str(error))]
    with tl.open(path, direct=direct) as file:
        ways = {
            "os.preadv": per_call(lambda offset: os.preadv(descriptor, memory, offset), offsets),
            "torch tensor": per_call(lambda offset: file.pread(tensor, offset), offsets),
            "numpy array": per_call(lambda offset: file.pread(array, offset), offsets),
        }
        got = interleave(bench.rounds, ways, f"latency, {way}")
    os.close(descriptor)
    if not torch.equal(tensor, bench.source[offsets[-1] : offsets[-1] + BLOCK]):
        raise SystemExit("engine: a 4 KiB read brought other bytes than were written")
    return [
        Comparison(
            *(
                "latency",
                f"4 KiB blocking pread, {way}, {kind}",
                "us",
                "os.preadv",
                got[kind],
                got["os.preadv"],
            ),
            compared="difference",
            at_most=3.0,
        )
        for kind in ("torch tensor", "numpy array")
    ]


def per_call(call: Callable[[int], int], offsets: list[int]) -> Callable[[], float]:
    """Microseconds a call, on average over all of `offsets`."""

    def once() -> float:
        start = time.perf_counter()
        for offset in offsets:
            call(offset)
        return (time.perf_counter() - start) / len(offsets) * 1e6

    return once
