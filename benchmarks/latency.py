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
from measurement import Comparison, progress
from workbench import Workbench

import trunkline as tl

BLOCK = 4096
CALLS = 10_000  # a round
TURN = 100


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
        ways: dict[str, Callable[[int], int]] = {
            "os.preadv": lambda offset: os.preadv(descriptor, memory, offset),
            "torch tensor": lambda offset: file.pread(tensor, offset),
            "numpy array": lambda offset: file.pread(array, offset),
        }
        got: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(bench.rounds + 1):
            progress(f"latency, {way}: round {number} of {bench.rounds}")
            for name, average in one_round(ways, offsets).items():
                if number > 0:  # the first warms up
                    got[name].append(average)
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


def one_round(ways: dict[str, Callable[[int], int]], offsets: list[int]) -> dict[str, float]:
    """Microseconds a call, on average over all of `offsets`. The ways take turns every few calls: what is
    sought is much less than what the machine's other work adds and takes away from second to second.
    """
    spent = dict.fromkeys(ways, 0.0)
    for begin in range(0, len(offsets), TURN):
        turn = offsets[begin : begin + TURN]
        for name, call in ways.items():
            call(turn[0])  # the way's code and data are in the cache when its clock starts
            start = time.perf_counter()
            for offset in turn:
                call(offset)
            spent[name] += time.perf_counter() - start
    return {name: seconds / len(offsets) * 1e6 for name, seconds in spent.items()}
